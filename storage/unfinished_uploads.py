"""Multipart uploads that dead writers left in S3: invisible and harmless, but paid for until they are removed."""

from __future__ import annotations

import logging
from typing import Any

from storage.remote_target import (
    CONNECT_TIMEOUT,
    MAX_RETRIES,
    REQUEST_TIMEOUT,
    Target,
    environment_secrets,
    redact,
)

logger = logging.getLogger(__name__)


def abort_unfinished_uploads(target: Target) -> list[str]:
    """Aborts the uploads below a folder; of a living writer it would cost the shard that it has open.

    Credentials that may not list or abort uploads are no reason to fail: a warning says what to do.

    Args:
        target: a folder in S3.

    Returns:
        The keys of the aborted uploads, inside the folder.
    """
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        read_timeout=REQUEST_TIMEOUT.total_seconds(),
        retries={"mode": "standard", "total_max_attempts": MAX_RETRIES},
        s3={"addressing_style": "path"},
    )
    folder = f"{target.prefix}/" if target.prefix else ""
    aborted = []
    try:
        client: Any = botocore.session.get_session().create_client("s3", config=config)
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=target.bucket, Prefix=folder)
        for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
            client.abort_multipart_upload(
                Bucket=target.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            aborted.append(upload["Key"].removeprefix(folder))
    except (BotoCoreError, ClientError) as exc:
        logger.warning(
            "s3://%s/%s: unfinished uploads of dead writers can't be removed (%s). Nobody sees them, but they take "
            "paid space: let a lifecycle rule of the bucket abort incomplete multipart uploads after a few days",
            target.bucket,
            folder,
            redact(str(exc), environment_secrets()),
        )
    return aborted
