"""What people put into URLs isn't shown."""

from __future__ import annotations

import pytest

from storage.errors import OutputError, PromptError
from storage.files import Store
from storage.prompts.source import source_digest
from storage.urls import shown_url, without_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("/data/100%?/x@y:z", "/data/100%?/x@y:z"),
        (
            "abfs://container@account.dfs.core.windows.net/a",
            "abfs://container@account.dfs.core.windows.net/a",
        ),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("https://me:pw@host/a?sig=x", "https://***@host/a?***"),
        ("simplecache::https://host/a?X-Amz-Signature=x&y=z", "simplecache::https://host/a?***"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_a_librarys_message_is_shown_without_the_urls_query() -> None:
    url = "https://host/a?sig=secret"
    assert without_url(f"404 for {url}, path=a?sig=secret", url) == "404 for https://host/a?***, path=a?***"
    assert without_url("no such file: a", "a") == "no such file: a"


@pytest.mark.parametrize("url", ["https://me:secret@host/dump", "s3://bucket/dump?sig=secret"])
def test_a_dump_is_not_taken_by_a_url_with_a_credential(url: str) -> None:
    with pytest.raises(OutputError, match="credentials belong in the environment") as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_a_prompt_file_that_is_not_there_is_named_without_its_signature() -> None:
    with pytest.raises(PromptError) as caught:
        source_digest("http://127.0.0.1:9/prompts.jsonl?X-Amz-Signature=secret")
    assert "http://127.0.0.1:9/prompts.jsonl?***" in str(caught.value)
    assert "secret" not in repr(caught.value)
    assert caught.value.__suppress_context__
