"""Which bucket a URL means, and how its client is set up: time limits, retries and where credentials come from.

Credentials come from the environment, from the provider's own files or from the machine's role. None is taken
from a URL, and every known one is blotted out of error messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from storage.errors import OutputError

PROTOCOLS: Mapping[str, Literal["s3", "gcs", "azure"]] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "azure": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""URL scheme -> provider."""

CONNECT_TIMEOUT = timedelta(seconds=10)
REQUEST_TIMEOUT = timedelta(seconds=120)
"""Of one request, body included; requests are of at most 16 MiB."""
RETRY_TIMEOUT = timedelta(minutes=3)
"""From a request's first try to its last."""
MAX_RETRIES = 12
FIRST_BACKOFF = timedelta(milliseconds=200)
LONGEST_BACKOFF = timedelta(seconds=15)
_CREDENTIALS_CACHED = timedelta(minutes=5)
_SECRET_VARIABLES = re.compile(
    r"(AWS|AZURE|AZURITE|GOOGLE)_.*(KEY|SECRET|TOKEN|SAS|PASSWORD|ACCOUNT_JSON|STRING)"
)
_SECRET_FIELDS = re.compile(
    r"(?i)((?:sig|x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature)=|"
    r"<(?:AWSAccessKeyId|SignatureProvided|StringToSign|StringToSignBytes|CanonicalRequest|CanonicalRequestBytes)>|"
    r"authorization: ?)[^&<\s\"']+[^&<\"']*"
)
_SHORTEST_SECRET = 6
"""Shorter values would blot out words."""


@dataclass(frozen=True)
class Target:
    """A folder in an object store.

    Attributes:
        provider: whose interface it speaks.
        bucket: bucket or container.
        prefix: folder in it, without slashes at its ends; may be empty.
        account: Azure's storage account where the URL names it.
    """

    provider: Literal["s3", "gcs", "azure"]
    bucket: str
    prefix: str
    account: str | None = None


def parse_target(url: str) -> Target:
    """What ``url`` means. Pure.

    Args:
        url: ``s3://bucket/folder``, ``gs://bucket/folder``, ``az://container/folder`` or
            ``abfs[s]://container@account.dfs.core.windows.net/folder``.

    Raises:
        OutputError: it names no bucket.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")  # not urlsplit: "#" may be part of a name
    before, _, host = authority.rpartition("@")
    provider = PROTOCOLS[scheme]
    bucket, account = (before, host.split(".")[0]) if before else (host, None)
    if not bucket or (account and provider != "azure"):
        raise OutputError(f"{url}: names no bucket; write it as {scheme}://BUCKET/FOLDER")
    return Target(provider, bucket, path.strip("/"), account)


@dataclass(frozen=True)
class Client:
    """An open client and what must never be shown.

    Attributes:
        store: obstore's store, with the prefix applied.
        secrets: credentials that are in use, for `redact`.
        anonymous: no credentials were found.
    """

    store: Any
    secrets: tuple[str, ...]
    anonymous: bool = False


def open_client(target: Target, url: str) -> Client:
    """Opens the client; nothing is sent yet.

    Raises:
        OutputError: a package is missing, or the provider's settings can't be used.
    """
    try:
        import obstore.store as providers
    except ImportError:
        raise _missing("obstore", url) from None
    common = {"prefix": target.prefix or None, "retry_config": _retries()}
    if target.provider == "s3":
        return _open_s3(providers, target, url, common)
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT", "") or os.environ.get("AZURE_ENDPOINT", "")
    emulated = os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    if target.provider == "gcs":
        store = providers.GCSStore(target.bucket, client_options=_client_options(""), **common)
    else:
        config = {"account_name": target.account} if target.account else {}
        options = _client_options("http://" if emulated else endpoint)
        store = providers.AzureStore(target.bucket, config=config, client_options=options, **common)
    return Client(store, environment_secrets())


def _open_s3(providers: Any, target: Target, url: str, common: dict[str, Any]) -> Client:
    """Finds credentials, region and endpoint through botocore, as every AWS tool does."""
    try:
        import botocore.session
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise _missing("botocore", url) from None
    try:
        session = botocore.session.get_session()
        scoped = session.get_scoped_config()
        credentials = session.get_credentials()
        region = session.get_config_variable("region") or "us-east-1"
        endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide() or ""
    except BotoCoreError as exc:
        raise OutputError(f"{url}: the AWS configuration can't be used: {exc}") from None
    # Unsigned payload: hashing each body with SHA-256 costs five times what sending it does. TLS guards the
    # way, and every byte has an xxh3 in the manifest.
    config: dict[str, Any] = {"region": region, "unsigned_payload": True}
    if endpoint:
        config["endpoint"] = endpoint
    if credentials is None:
        config["skip_signature"] = True
    frozen = credentials.get_frozen_credentials() if credentials else None
    secrets = tuple(s for s in (frozen.access_key, frozen.secret_key, frozen.token) if s) if frozen else ()
    store = providers.S3Store(
        target.bucket,
        config=config,
        client_options=_client_options(endpoint),
        credential_provider=_provider_of(credentials) if credentials else None,
        **common,
    )
    return Client(store, (*secrets, *environment_secrets()), credentials is None)


def _provider_of(credentials: Any) -> Callable[[], dict[str, Any]]:
    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renews those of a role when they are about to expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_CACHED,
        }

    return provide


def _client_options(endpoint: str) -> dict[str, Any]:
    return {
        "connect_timeout": CONNECT_TIMEOUT,
        "timeout": REQUEST_TIMEOUT,
        "allow_http": endpoint.startswith("http://"),  # only where the user's endpoint says so
    }


def _retries() -> dict[str, Any]:
    return {
        "max_retries": MAX_RETRIES,
        "retry_timeout": RETRY_TIMEOUT,
        "backoff": {"init_backoff": FIRST_BACKOFF, "max_backoff": LONGEST_BACKOFF, "base": 2},
    }


def _missing(package: str, url: str) -> OutputError:
    return OutputError(
        f"{url}: object stores need the package {package}, which isn't installed; pip install 'hsdump[cloud]'"
    )


def environment_secrets() -> tuple[str, ...]:
    """Values of the environment's variables that hold credentials."""
    return tuple(v for k, v in os.environ.items() if _SECRET_VARIABLES.fullmatch(k))


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """``text`` without any of ``secrets`` and without signatures in URLs, headers and answers. Pure."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return _SECRET_FIELDS.sub(r"\1***", text)
