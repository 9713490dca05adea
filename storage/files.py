"""The one door to file systems: keys below a root, put if absent, whole objects only.

Local disks are handled by hand because fsspec's local ``pipe_file(mode="create")`` lets two racing writers
both win. S3, Google Cloud Storage and Azure go through obstore (`storage.remote`), and a dump can be read
through anything else that fsspec reaches (`storage.fsspec_files`).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from storage import localdisk
from storage.errors import AlreadyExists, CorruptDump, OutputError, StorageError
from storage.localdisk import storage_error
from storage.remote_target import PROTOCOLS
from storage.sinks import LocalSink, ObjectSink
from storage.urls import refuse_credentials

if TYPE_CHECKING:
    from storage.fsspec_files import FsspecStore
    from storage.remote import RemoteStore

CONDITIONAL_PUT = frozenset({"file", "memory", *PROTOCOLS})
"""URL schemes that a dump can be written to: of racing put-if-absent calls exactly one wins."""


class Store:
    """Objects below one root, on a local disk or on anything that fsspec reaches.

    Picklable; its file system is opened on first use in each process, because object store clients survive
    neither pickling nor fork.

    Args:
        url: absolute or relative local path, ``file://``, ``memory://`` or an fsspec URL such as ``s3://...``.
        page_cache: False reads ranges of a local disk past the page cache where that is possible.

    Attributes:
        url: the root; an absolute path for local disks, whatever was given.
        local_root: the root folder on local disks, else None.
        protocol: ``file``, ``memory``, ``s3``, ...

    Raises:
        OutputError: the URL holds a credential.
    """

    def __init__(self, url: str, page_cache: bool = True) -> None:
        refuse_credentials(url)
        protocol, _, path = url.rpartition("://")
        self.protocol = protocol.split("::")[0] or "file"
        self.local_root: Path | None = None
        if self.protocol in ("file", "local"):
            self.protocol = "file"
            self.local_root = Path(os.path.abspath(Path(path).expanduser()))
        self.url = str(self.local_root) if self.local_root else url.rstrip("/")
        self._pread_into = localdisk.pread_into if page_cache else localdisk.pread_direct_into
        self._opened: tuple[int, RemoteStore | FsspecStore] | None = None

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def where(self, key: str) -> str:
        """Full path or URL of ``key``, for messages."""
        return f"{self.url}/{key}"

    def read(self, key: str) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it can't be read.
        """
        with self._errors("reading", key):
            if self.local_root:
                return (self.local_root / key).read_bytes()
            return self._remote().read(key)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; raises as `read_range_into`."""
        buffer = bytearray(length)
        self.read_range_into(key, offset, memoryview(buffer))
        return bytes(buffer)

    def read_range_into(
        self, key: str, offset: int, buffer: memoryview, seen: localdisk.Seen | None = None
    ) -> None:
        """Fills ``buffer`` (bytes, writable) with the object's bytes from ``offset``.

        ``seen`` is told of all of them, in order: on a local disk piece by piece, while each is in the processor's
        cache.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptDump: the object ends before the range does.
            StorageError: it can't be read.
        """
        with self._errors("reading", key):
            if self.local_root:
                got = self._pread_into(self.local_root / key, offset, buffer, seen)
            else:
                got = self._remote().read_range_into(key, offset, buffer)
                if seen is not None:
                    seen(buffer)
        if got < len(buffer):
            raise CorruptDump(
                f"{self.where(key)} ends at byte {offset + got}, but bytes {offset} to "
                f"{offset + len(buffer)} are wanted; `hsdump verify` names the samples that are affected"
            )

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Puts a whole object, durably, unless there is one; of racing callers exactly one succeeds.

        Raises:
            AlreadyExists: there is an object under that key.
            OutputError: this kind of storage has no put-if-absent.
            StorageFull: no space is left.
            StorageError: anything else.
        """
        with self._errors("writing", key):
            if self.local_root:
                temp = localdisk.write_temporary(self.local_root, data)
                localdisk.publish_if_absent(temp, self.local_root / key)
                return
            self._require_conditional_put()
            self._remote().put_if_absent(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Puts a whole object, durably, over whatever was there; readers see the old or the new one.

        Raises:
            StorageFull: no space is left.
            StorageError: anything else.
        """
        with self._errors("writing", key):
            if self.local_root:
                temp = localdisk.write_temporary(self.local_root, data)
                localdisk.publish_over(temp, self.local_root / key)
            else:
                self._remote().replace(key, data)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of the objects directly below the folder ``prefix``, sorted; empty when missing."""
        with self._errors("listing", prefix):
            try:
                if self.local_root:
                    with os.scandir(self.local_root / prefix) as entries:
                        found = [(e.name, e.stat().st_size) for e in entries if e.is_file()]
                else:
                    found = self._remote().list(prefix)
            except FileNotFoundError:
                return []
        return sorted((f"{prefix}/{name}" if prefix else name, int(size)) for name, size in found)

    def size(self, key: str) -> int | None:
        """Bytes of the object, None when there is none."""
        with self._errors("looking at", key):
            try:
                if self.local_root:
                    return (self.local_root / key).stat().st_size
                return self._remote().size(key)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, key: str) -> bool:
        """Whether there is an object under ``key``."""
        return self.size(key) is not None

    def delete(self, key: str) -> None:
        """Removes the object; nothing happens when there is none."""
        with self._errors("removing", key), contextlib.suppress(FileNotFoundError):
            if self.local_root:
                (self.local_root / key).unlink()
            else:
                self._remote().delete(key)

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, None where nobody knows."""
        return localdisk.free_bytes(self.local_root) if self.local_root else None

    def open_read(self, key: str) -> BinaryIO:
        """The object as a seekable binary file; the caller closes it. Raises as `read`."""
        with self._errors("reading", key):
            if self.local_root:
                return open(self.local_root / key, "rb")
            return self._remote().open_read(key)

    def object_sink(self, key: str) -> ObjectSink:
        """A new object to be written in pieces; it appears when its sink commits, if absent.

        Raises:
            OutputError: this kind of storage has no put-if-absent.
            StorageError: the temporary file can't be made.
        """
        with self._errors("writing", key):
            if not self.local_root:
                self._require_conditional_put()
                return self._remote().object_sink(key)
            return LocalSink(self.local_root, self.local_root / key)

    def remove_sinks(self) -> None:
        """Removes half-written objects that dead writers left; only once no writer is alive."""
        if self.local_root:
            with self._errors("removing", localdisk.TEMPORARIES):
                localdisk.remove_sinks(self.local_root)
        else:
            self._remote().remove_sinks()

    def require_put_if_absent(self) -> None:
        """Shows that a second put-if-absent is refused: some servers that speak S3 ignore the condition.

        Raises:
            OutputError: it isn't, or this kind of storage has none.
            StorageError: the storage failed.
        """
        key = f"{localdisk.TEMPORARIES}/probe-{uuid.uuid4().hex}"
        self.put_if_absent(key, b"first")
        try:
            self.put_if_absent(key, b"second")
        except AlreadyExists:
            return
        finally:
            self.delete(key)
        raise OutputError(
            f"{self.url}: the server ignores the condition of a put-if-absent (If-None-Match), so a late writer "
            "could overwrite a shard; use a server that keeps it (AWS S3, MinIO, Google Cloud Storage, Azure), or "
            "a local path"
        )

    def _require_conditional_put(self) -> None:
        if self.protocol not in CONDITIONAL_PUT:
            raise OutputError(
                f"{self.url}: a dump can be read from {self.protocol}:// but not written there, because it has no "
                "put-if-absent with one sure winner and a late writer could overwrite a shard; write to a local "
                "path, s3://, gs://, az:// or abfs://"
            )

    def _remote(self) -> RemoteStore | FsspecStore:
        if self._opened is None or self._opened[0] != os.getpid():
            remote: RemoteStore | FsspecStore
            if self.protocol in PROTOCOLS:
                from storage.remote import RemoteStore  # a trainer with a local dump needn't have obstore

                remote = RemoteStore(self.url)
            else:
                from storage.fsspec_files import FsspecStore

                remote = FsspecStore(self.url)
            self._opened = (os.getpid(), remote)
        return self._opened[1]

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except (OutputError, StorageError, FileNotFoundError):
            raise
        except FileExistsError:
            raise AlreadyExists(f"{self.where(key)} is there already, and it is never overwritten") from None
        except OSError as exc:
            raise storage_error(doing, self.where(key), exc, self.local_root) from exc
