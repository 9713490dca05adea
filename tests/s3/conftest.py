"""Servers for a whole session, and a fresh bucket for each test."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from faulty_proxy import FaultyProxy
from servers import ACCOUNT, ACCOUNT_KEY, azurite, moto

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))  # made_dumps

SECRET = "planted-secret-0123456789abcdef"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.s3)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto") / "log") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azurite") / "log") as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A botocore client, with the environment set so that everything finds the server."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "planted-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    return botocore.session.get_session().create_client("s3")


@pytest.fixture
def bucket(s3: Any) -> str:
    name = f"dumps-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def azure_container(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    from azure.storage.blob import BlobServiceClient

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure_endpoint)
    name = f"dumps-{uuid.uuid4().hex[:12]}"
    BlobServiceClient(azure_endpoint, credential=ACCOUNT_KEY).create_container(name)
    return name


@pytest.fixture(params=["s3", "azure"])
def dump_url(request: pytest.FixtureRequest) -> str:
    """A folder in a fresh bucket of each provider."""
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('bucket')}/folder #1/dump é"
    return f"az://{request.getfixturevalue('azure_container')}/folder/dump é"


@pytest.fixture
def proxy(s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the S3 server that everything goes through, and that can be told to fail."""
    with FaultyProxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
