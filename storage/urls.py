"""URLs as they may be shown and stored: without the credentials that people put into them. Pure, no I/O."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from storage.errors import OutputError

_PASSWORD = re.compile(r"(://)[^/@]*:[^/@]*@")
_QUERY = re.compile(r"(://[^?]*\?).+")


def shown_url(url: str) -> str:
    """``url`` without user and password, and without its query, which signs a presigned URL; paths are as given."""
    return _QUERY.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))


def without_url(text: str, url: str) -> str:
    """A library's message about ``url``, with the URL in the form that may be shown."""
    text = text.replace(url, shown_url(url))
    query = urlsplit(url).query if "://" in url else ""
    return text.replace(query, "***") if query else text


def refuse_credentials(url: str) -> None:
    """Refuses a dump's URL that holds a credential: it would be in logs and in the dump itself.

    Raises:
        OutputError: ``url`` has a password or a query.
    """
    if shown_url(url) != url:
        raise OutputError(
            f"{shown_url(url)}: a dump's URL with a password or a query isn't taken, because it is written to "
            "logs and to the dump; credentials belong in the environment or the provider's own files"
        )
