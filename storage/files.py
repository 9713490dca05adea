"""The one door to file systems: keys below a root, put if absent, whole objects only.

Local disks are handled by hand because fsspec's local ``pipe_file(mode="create")`` lets two racing writers
both win. Everything else goes through fsspec, and only where a conditional put is known to have one winner.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from storage import localdisk
from storage.errors import AlreadyExists, CorruptDump, OutputError
from storage.localdisk import storage_error
from storage.sinks import BufferSink, LocalSink, ObjectSink

CONDITIONAL_PUT = frozenset({"memory", "s3", "s3a", "abfs", "abfss", "az"})
"""Protocols whose fsspec implementation has one winner of racing ``pipe_file(mode="create")`` calls (memory://
under a lock of our own, inside one process)."""

_memory_lock = threading.Lock()


class Store:
    """Objects below one root, on a local disk or on anything that fsspec reaches.

    Picklable; its file system is opened on first use in each process, because object store clients survive
    neither pickling nor fork.

    Args:
        url: absolute or relative local path, ``file://``, ``memory://`` or an fsspec URL such as ``s3://...``.

    Attributes:
        url: the root; an absolute path for local disks, whatever was given.
        local_root: the root folder on local disks, else None.
        protocol: ``file``, ``memory``, ``s3``, ...
    """

    def __init__(self, url: str) -> None:
        protocol, _, path = url.rpartition("://")
        self.protocol = protocol.split("::")[0] or "file"
        self.local_root: Path | None = None
        if self.protocol in ("file", "local"):
            self.protocol = "file"
            self.local_root = Path(os.path.abspath(Path(path).expanduser()))
        self.url = str(self.local_root) if self.local_root else url.rstrip("/")
        self._remote: tuple[int, Any, str] | None = None

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remote": None}

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
            fs, root = self._fs()
            return bytes(fs.cat_file(f"{root}/{key}"))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; raises as `read_range_into`."""
        buffer = bytearray(length)
        self.read_range_into(key, offset, memoryview(buffer))
        return bytes(buffer)

    def read_range_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` (bytes, writable) with the object's bytes from ``offset``.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptDump: the object ends before the range does.
            StorageError: it can't be read.
        """
        with self._errors("reading", key):
            if self.local_root:
                got = localdisk.pread_into(self.local_root / key, offset, buffer)
            else:
                fs, root = self._fs()
                data = fs.cat_file(f"{root}/{key}", start=offset, end=offset + len(buffer))
                got = len(data)
                buffer[:got] = data
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
            fs, root = self._fs()
            path = f"{root}/{key}"
            if self.protocol == "memory":
                with _memory_lock:
                    if fs.exists(path):
                        raise FileExistsError(path)
                    fs.pipe_file(path, data)
            else:
                fs.pipe_file(path, data, mode="create")

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
                fs, root = self._fs()
                fs.pipe_file(f"{root}/{key}", data)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of the objects directly below the folder ``prefix``, sorted; empty when missing."""
        with self._errors("listing", prefix):
            try:
                if self.local_root:
                    with os.scandir(self.local_root / prefix) as entries:
                        found = [(e.name, e.stat().st_size) for e in entries if e.is_file()]
                else:
                    fs, root = self._fs()
                    listed = fs.ls(f"{root}/{prefix}", detail=True)
                    found = [(e["name"].rsplit("/", 1)[1], e["size"]) for e in listed if e["type"] == "file"]
            except FileNotFoundError:
                return []
        return sorted((f"{prefix}/{name}" if prefix else name, int(size)) for name, size in found)

    def size(self, key: str) -> int | None:
        """Bytes of the object, None when there is none."""
        with self._errors("looking at", key):
            try:
                if self.local_root:
                    return (self.local_root / key).stat().st_size
                fs, root = self._fs()
                return int(fs.info(f"{root}/{key}")["size"])
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
                fs, root = self._fs()
                fs.rm_file(f"{root}/{key}")

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, None where nobody knows."""
        return localdisk.free_bytes(self.local_root) if self.local_root else None

    def open_read(self, key: str) -> BinaryIO:
        """The object as a seekable binary file; the caller closes it. Raises as `read`."""
        with self._errors("reading", key):
            if self.local_root:
                return open(self.local_root / key, "rb")
            fs, root = self._fs()
            return cast(BinaryIO, fs.open(f"{root}/{key}", "rb"))

    def object_sink(self, key: str) -> ObjectSink:
        """A new object to be written in pieces; it appears when its sink commits, if absent.

        Raises:
            OutputError: this kind of storage has no put-if-absent.
            StorageError: the temporary file can't be made.
        """
        if not self.local_root:
            self._require_conditional_put()
            return BufferSink(lambda data: self.put_if_absent(key, data))
        with self._errors("writing", key):
            return LocalSink(self.local_root, self.local_root / key)

    def remove_sinks(self) -> None:
        """Removes half-written objects that dead writers left; only once no writer is alive."""
        if self.local_root:
            with self._errors("removing", localdisk.TEMPORARIES):
                localdisk.remove_sinks(self.local_root)

    def _require_conditional_put(self) -> None:
        if self.protocol not in CONDITIONAL_PUT:
            raise OutputError(
                f"{self.url}: {self.protocol}:// has no put-if-absent with one sure winner, so a late writer "
                "could overwrite a shard; write to a local path or to one of "
                f"{', '.join(sorted(CONDITIONAL_PUT))}"
            )

    def _fs(self) -> tuple[Any, str]:
        if self._remote is None or self._remote[0] != os.getpid():
            import fsspec  # its object store plug-ins are slow to import

            # Another process may have written since the last listing, so nothing is cached.
            fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
            self._remote = (os.getpid(), fs, root.rstrip("/"))
        return self._remote[1], self._remote[2]

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except (OutputError, AlreadyExists, FileNotFoundError):
            raise
        except FileExistsError:
            raise AlreadyExists(f"{self.where(key)} is there already, and it is never overwritten") from None
        except OSError as exc:
            raise storage_error(doing, self.where(key), exc, self.local_root) from exc
        except Exception as exc:
            if self.local_root:
                raise
            # Object store clients raise classes of their own, which nobody outside this file should know.
            raise storage_error(doing, self.where(key), exc) from exc
