"""Credentials come from the usual places, and nobody sees them."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SECRET
from faulty_proxy import FaultyProxy
from made_dumps import make_dump
from servers import ACCOUNT_KEY

from storage import remote_target
from storage.errors import OutputError, StorageDenied, StorageError
from storage.files import Store

SIGNATURE_ANSWER = (
    b"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>planted-key-id</AWSAccessKeyId>"
    b"<StringToSign>AWS4-HMAC-SHA256 " + SECRET.encode() + b"</StringToSign>"
    b"<SignatureProvided>0123abcdef</SignatureProvided>"
    b"<Message>no right for planted-key-id with " + SECRET.encode() + b"</Message></Error>"
)


def shown(call: Callable[[], Any], error: type[BaseException]) -> str:
    """Everything that a person could see of a failing call."""
    with pytest.raises(error) as caught:
        call()
    return "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))


def test_no_object_of_a_dump_holds_a_credential(
    s3: Any, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    make_dump(f"s3://{bucket}/dump", [5, 30])
    for item in s3.list_objects_v2(Bucket=bucket)["Contents"]:
        answer = s3.get_object(Bucket=bucket, Key=item["Key"])
        for text in (answer["Body"].read(), repr(answer["Metadata"]).encode(), item["Key"].encode()):
            assert SECRET.encode() not in text
            assert b"planted-key-id" not in text
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("botocore")]
    assert SECRET not in "".join(ours)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_its_own_error_and_shows_no_credential(
    proxy: FaultyProxy, bucket: str, status: int
) -> None:
    store = Store(f"s3://{bucket}/dump")
    proxy.fail("GET", "", 100, status=status, body=SIGNATURE_ANSWER)
    proxy.fail("PUT", "", 100, status=status, body=SIGNATURE_ANSWER)
    error = StorageError if status == 400 else StorageDenied
    for call in (
        lambda: store.read("x"),
        lambda: store.list("claims"),
        lambda: store.put_if_absent("x", b""),
        lambda: store.replace("x", b""),
    ):
        text = shown(call, error)
        assert "SignatureDoesNotMatch" in text
        assert f"s3://{bucket}/dump" in text
        for secret in (SECRET, "planted-key-id", "0123abcdef"):
            assert secret not in text


def test_a_server_that_is_not_there_shows_no_credential(
    s3: Any, monkeypatch: pytest.MonkeyPatch, azure_container: str
) -> None:
    monkeypatch.setattr(remote_target, "MAX_RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/testaccount")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2021&sig=PlantedSignature%3D")
    for url in ("s3://bucket/dump", f"az://{azure_container}/dump"):
        text = shown(lambda url=url: Store(url).read("x"), StorageError)
        for secret in (SECRET, ACCOUNT_KEY, "PlantedSignature"):
            assert secret not in text


@pytest.mark.parametrize(
    "url", [f"s3://key:{SECRET}@bucket/dump", f"s3://bucket/dump?token={SECRET}", f"az://c/dump?sig={SECRET}"]
)
def test_a_credential_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    text = shown(lambda: Store(url).read("x"), OutputError)
    assert SECRET not in text
    assert "belong in the environment" in text


def test_credentials_endpoint_and_region_come_from_the_profile_in_aws_files(
    s3: Any, bucket: str, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = eu-west-1\nservices = local\n[services local]\ns3 =\n  endpoint_url = {s3_endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = planted-key-id\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = Store(f"s3://{bucket}/dump")
    store.put_if_absent("x", b"1")
    assert store.read("x") == b"1"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(OutputError, match=r"obstore, which isn't installed; pip install 'hsdump\[cloud\]'"):
        Store("gs://bucket/dump").read("x")
