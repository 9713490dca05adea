"""Reads the prompt file: raw rows in order, and the digest of its bytes. The only place that opens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.errors import PromptError
from storage.prompts.rows import CONTENT_FIELDS, ID_FIELDS
from storage.prompts.spec import FileFormat
from storage.remote_target import environment_secrets, redact
from storage.urls import shown_url, without_url

RawRow = bytes | dict[str, Any]
"""A line of JSONL as it stands in the file, or a row of Parquet."""

_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_COMPRESSION_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
_READ_BYTES = 4 << 20
_PARQUET_ROWS = 256


def file_kind(url: str, declared: FileFormat) -> Literal["jsonl", "parquet"]:
    """What kind of file ``url`` is, by its name unless declared.

    Raises:
        PromptError: the name doesn't say.
    """
    if declared != "auto":
        return declared
    suffixes = [s.lower() for s in PurePosixPath(url.split("?")[0]).suffixes]
    while suffixes and suffixes[-1] in _COMPRESSION_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _JSONL_SUFFIXES:
        return "jsonl"
    if last in _PARQUET_SUFFIXES:
        return "parquet"
    raise PromptError(
        f"prompt file {shown_url(url)}: its name doesn't end in {', '.join(_JSONL_SUFFIXES + _PARQUET_SUFFIXES)} "
        "(with or without a compression suffix); set prompts.format to jsonl or parquet"
    )


def source_digest(url: str) -> str:
    """xxh3-128 of the file's bytes as stored, hexadecimal.

    Raises:
        PromptError: there is no such file, or it can't be read.
    """
    hasher = xxhash.xxh3_128()
    with _open(url, compression=None) as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def read_rows(url: str, file_format: FileFormat, limit: int | None = None) -> Iterator[tuple[int, RawRow]]:
    """Yields (row of the file from 0, raw row). Blank lines of JSONL count as lines but aren't rows.

    Raises:
        PromptError: the file can't be opened, decompressed or read as what its name says.
    """
    rows = _parquet_rows(url) if file_kind(url, file_format) == "parquet" else _jsonl_rows(url)
    for taken, row in enumerate(rows):
        if limit is not None and taken >= limit:
            return
        yield row


def _jsonl_rows(url: str) -> Iterator[tuple[int, RawRow]]:
    with _open(url, compression="infer") as file:
        for number, line in enumerate(_lines(file)):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _lines(file: Any) -> Iterator[bytes]:
    """Lines without their end; zstandard's readers have no readline."""
    begun: list[bytes] = []
    while block := file.read(_READ_BYTES):
        first, *rest = block.split(b"\n")
        begun.append(first)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun = [rest[-1]]
    yield b"".join(begun)


def _parquet_rows(url: str) -> Iterator[tuple[int, RawRow]]:
    with _open(url, compression=None) as file:
        try:
            table = pq.ParquetFile(file)
            present = [name for name in table.schema_arrow.names if name in (*ID_FIELDS, *CONTENT_FIELDS)]
            if not present:
                raise PromptError(
                    f"prompt file {shown_url(url)} has the columns {', '.join(table.schema_arrow.names)}; none of "
                    "messages, conversations, text and input_ids is among them"
                )
            number = 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=present):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
        except pa.ArrowException as exc:
            raise PromptError(f"prompt file {shown_url(url)} can't be read as Parquet: {exc}") from exc


@contextmanager
def _open(url: str, compression: str | None) -> Iterator[Any]:
    try:
        with fsspec.open(url, "rb", compression=compression) as file:
            yield file
    except PromptError:
        raise
    except FileNotFoundError:
        raise PromptError(
            f"there is no prompt file {shown_url(url)}; mend prompts.url in the run file"
        ) from None
    except IsADirectoryError:
        raise PromptError(f"prompt file {shown_url(url)} is a folder; prompts.url names one file") from None
    except Exception as exc:  # decompressors and object store clients raise classes of their own
        # Not chained: a signed URL or a signed request may be in the cause's text.
        reason = f"{type(exc).__name__}: {redact(without_url(str(exc), url), environment_secrets())}"
        raise PromptError(f"prompt file {shown_url(url)} can't be read: {reason}") from None
