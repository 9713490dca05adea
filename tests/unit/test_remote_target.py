"""What a URL of an object store means, and what an error may show."""

from __future__ import annotations

import pytest

from storage.errors import OutputError
from storage.remote_target import Target, environment_secrets, parse_target, redact


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("s3://bucket/a/dump é", Target("s3", "bucket", "a/dump é")),
        ("s3://bucket/run #1/dump", Target("s3", "bucket", "run #1/dump")),
        ("s3a://bucket", Target("s3", "bucket", "")),
        ("gs://bucket/a/", Target("gcs", "bucket", "a")),
        ("gcs://bucket/a", Target("gcs", "bucket", "a")),
        ("az://container/a", Target("azure", "container", "a")),
        ("abfs://container/a", Target("azure", "container", "a")),
        ("abfss://container@lab.dfs.core.windows.net/a", Target("azure", "container", "a", "lab")),
    ],
)
def test_a_url_names_provider_bucket_and_folder(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["s3://", "s3:///folder", "s3://somebody@bucket/a", "az:///a"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(OutputError, match="names no bucket"):
        parse_target(url)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://h/b?X-Amz-Signature=SECRETVALUE&x=1 failed",
        "https://h/c?sv=2021&sig=SECRETVALUE%3D",
        "Authorization: AWS4-HMAC-SHA256 Credential=SECRETVALUE/2026",
        "<StringToSign>AWS4\n20260101 SECRETVALUE</StringToSign>",
        "<CanonicalRequest>GET /x SECRETVALUE</CanonicalRequest>",
    ],
)
def test_signatures_are_blotted_out(text: str) -> None:
    shown = redact(text, ())
    assert "SECRETVALUE" not in shown
    assert "***" in shown


def test_known_secrets_are_blotted_out_and_short_values_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "long-secret")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "a")
    assert redact("a long-secret of a kind", environment_secrets()) == "a *** of a kind"
