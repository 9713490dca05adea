"""Objects in S3, Google Cloud Storage and Azure, through obstore: whole objects, put if absent, nothing cached."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from storage.errors import AlreadyExists, OutputError, StorageDenied, StorageError
from storage.part_sink import PART_BYTES, PartSink
from storage.range_file import RangeFile
from storage.remote_target import RETRY_TIMEOUT, Client, open_client, parse_target, redact
from storage.sinks import ByteArray
from storage.unfinished_uploads import abort_unfinished_uploads

PARTS_IN_FLIGHT = 4
READ_BYTES = 16 << 20
"""Of one request; larger ranges are read by several at a time."""
READERS = 8
FILE_BUFFER_BYTES = 1 << 20
MARK = "hsdumpmark"
"""Metadata field with a number that each put draws: it tells whose object is there after an answer was lost."""
PUT_PAUSES_S = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Between tries of one put whose outcome isn't known; each try has the client's own retries."""

_REFUSED = re.compile(r"status code: 40[13]\b")
"""Listing and multipart requests that are refused have no class of their own in obstore."""

_runtime_pid: int | None = None


class RemoteStore:
    """The remote half of `storage.files.Store`, for the schemes of `remote_target.PROTOCOLS`.

    Every method raises StorageDenied where the credentials are refused, and StorageError for what is left after
    the retries. No message and no chained exception holds a credential.

    Args:
        url: the root.

    Raises:
        OutputError: the URL can't be used, or a package is missing.
        StorageError: this process was forked from one that has used an object store.
    """

    def __init__(self, url: str) -> None:
        global _runtime_pid
        self._url = url.rstrip("/")
        if _runtime_pid not in (None, os.getpid()):
            # The client's threads didn't come along: any request would wait for ever.
            raise StorageError(
                f"{self._url}: this process was forked from one that had opened an object store, and its client "
                'doesn\'t survive that; start workers with multiprocessing_context="spawn"'
            )
        self._target = parse_target(url)
        self._client: Client = open_client(self._target, self._url)
        _runtime_pid = os.getpid()

    def where(self, key: str) -> str:
        """The object's URL."""
        return f"{self._url}/{key}"

    def read(self, key: str) -> bytes:
        """The whole object; FileNotFoundError when there is none."""
        import obstore

        with self._errors("reading", key):
            return bytes(obstore.get(self._client.store, key).bytes())

    def read_range_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fills ``buffer`` from ``offset``; returns how many bytes there were."""
        starts = range(0, len(buffer), READ_BYTES)
        if len(starts) <= 1:
            return self._read_piece(key, offset, buffer)
        pieces = [(offset + start, buffer[start : start + READ_BYTES]) for start in starts]
        with ThreadPoolExecutor(min(READERS, len(pieces))) as pool:
            got = list(pool.map(lambda piece: self._read_piece(key, *piece), pieces))
        return sum(got)

    def _read_piece(self, key: str, offset: int, buffer: memoryview) -> int:
        import obstore

        if not buffer:
            return 0
        length = len(buffer)
        try:
            with self._errors("reading", key):
                data = memoryview(obstore.get_range(self._client.store, key, start=offset, length=length))
        except FileNotFoundError:
            raise
        except StorageError:
            size = self.size(key)  # a range that begins past the end is refused, not answered with nothing
            if size is None or size > offset:
                raise
            return 0
        buffer[: len(data)] = data
        return len(data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Puts the object unless there is one; a repeated request isn't mistaken for somebody else's.

        Raises:
            AlreadyExists: there was one.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        mark = uuid.uuid4().hex
        deadline_s = time.monotonic() + RETRY_TIMEOUT.total_seconds()
        for pause_s in (*PUT_PAUSES_S, None):
            try:
                with self._errors("writing", key, missing_is_bucket=True):
                    options = {"mode": "create", "use_multipart": False, "attributes": {MARK: mark}}
                    obstore.put(self._client.store, key, data, **options)
                return
            except AlreadyExistsError:
                # S3 says so as well while another put goes on that may yet fail (409).
                failure = StorageError(f"writing {self.where(key)} failed: another put of it doesn't end")
            except StorageDenied:
                raise
            except StorageError as error:
                failure = error
            found = self._mark(key)
            if found == mark:
                return  # ours: only the answer was lost
            if found is not None:
                raise AlreadyExists(f"{self.where(key)} is there already, and it is never overwritten")
            if pause_s is None or time.monotonic() > deadline_s:
                raise failure
            time.sleep(pause_s)

    def _mark(self, key: str) -> str | None:
        """What the put that made the object drew; empty if it drew nothing, None if there is no object."""
        import obstore

        try:
            with self._errors("looking at", key):
                return str(obstore.get(self._client.store, key).attributes.get(MARK, ""))
        except FileNotFoundError:
            return None

    def replace(self, key: str, data: bytes) -> None:
        """Puts the object over whatever was there."""
        import obstore

        with self._errors("writing", key, missing_is_bucket=True):
            obstore.put(self._client.store, key, data, use_multipart=False)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(name, bytes) of the objects directly below the folder; all pages."""
        import obstore

        with self._errors("listing", prefix):
            listed = obstore.list_with_delimiter(self._client.store, prefix or None)["objects"]
        return [(o["path"].rsplit("/", 1)[-1], int(o["size"])) for o in listed]

    def size(self, key: str) -> int | None:
        """Bytes of the object, None when there is none."""
        import obstore

        try:
            with self._errors("looking at", key):
                return int(obstore.head(self._client.store, key)["size"])
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Removes the object, if there is one."""
        import obstore

        with contextlib.suppress(FileNotFoundError), self._errors("removing", key):
            obstore.delete(self._client.store, key)

    def open_read(self, key: str) -> BinaryIO:
        """The object as a seekable file."""
        size = self.size(key)
        if size is None:
            raise FileNotFoundError(self.where(key))

        def read(offset: int, buffer: memoryview) -> int:
            return self.read_range_into(key, offset, buffer)

        return cast(BinaryIO, io.BufferedReader(RangeFile(read, size), FILE_BUFFER_BYTES))

    def object_sink(self, key: str) -> PartSink:
        """A new object to be written in pieces."""
        return PartSink(
            self.where(key), lambda: _Upload(self, key), lambda data: self.put_if_absent(key, data)
        )

    def remove_sinks(self) -> None:
        """Removes unfinished uploads from S3; Azure drops them after a week, and obstore can't list them."""
        if self._target.provider == "s3":
            abort_unfinished_uploads(self._target)

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str, missing_is_bucket: bool = False) -> Iterator[None]:
        """Turns the client's errors into the project's. AlreadyExistsError passes.

        What is raised isn't chained to its cause, whose text may hold signed requests.
        """
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        failure: BaseException
        try:
            yield
            return
        except (AlreadyExistsError, StorageError):
            raise
        except FileNotFoundError:
            failure = FileNotFoundError(f"{self.where(key)}: there is no such object")
            if missing_is_bucket:
                failure = OutputError(f"{self._url}: there is no such bucket or container; make it first")
        except (BaseError, ValueError, OSError) as exc:
            failure = StorageError(f"{doing} {self.where(key)} failed: {self._brief(exc)}")
            if isinstance(exc, PermissionDeniedError | UnauthenticatedError) or _REFUSED.search(str(exc)):
                who = (
                    "no credentials were found" if self._client.anonymous else "the credentials were refused"
                )
                failure = StorageDenied(
                    f"{doing} {self.where(key)}: {who} ({self._brief(exc)}); check them and their rights"
                )
        raise failure from None

    def _brief(self, exc: BaseException) -> str:
        text = str(exc).split("\n\nDebug source")[0]
        return redact(" ".join(text.split()), self._client.secrets)[:600]


class _Upload:
    """A multipart upload; see `storage.part_sink.Upload`.

    The client can't complete an upload on condition that the name is free. The name is free because the shard's
    number is claimed by this process for ever; the look before completing catches a broken claim, and the
    manifest, which is put if absent, decides in the end.
    """

    def __init__(self, store: RemoteStore, key: str) -> None:
        import obstore

        self._store, self._key = store, key
        self._mark = uuid.uuid4().hex
        with store._errors("writing", key):
            self._writer: Any = obstore.open_writer(
                store._client.store,
                key,
                attributes={MARK: self._mark},
                buffer_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            )

    def write(self, part: ByteArray) -> None:
        """See `Upload.write`."""
        try:
            with self._store._errors("writing", self._key):
                self._writer.write(part)
        except FileNotFoundError:
            raise self._gone() from None

    def _gone(self) -> StorageError:
        where = self._store.where(self._key)
        return StorageError(
            f"writing {where} failed: the bucket, or the unfinished upload in it, was removed"
        )

    def complete(self) -> None:
        """See `Upload.complete`."""
        if self._store.size(self._key) is not None:
            where = self._store.where(self._key)
            raise AlreadyExists(f"{where} is there already, and it is never overwritten")
        try:
            with self._store._errors("writing", self._key):
                self._writer.close()
        except (StorageError, FileNotFoundError) as error:
            # Completed by a request whose answer was lost, the upload isn't found any more by the next one.
            if self._store._mark(self._key) == self._mark:
                return
            raise self._gone() if isinstance(error, FileNotFoundError) else error from None

    def abort(self) -> None:
        """See `Upload.abort`; what can't be removed now is invisible and goes by the bucket's lifecycle rule."""
        abandoned = StorageError("the object was given up")
        with contextlib.suppress(Exception):
            self._writer.__exit__(StorageError, abandoned, None)
