"""Any other file system that fsspec reaches: to read from, and memory:// to write to as well."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from storage.errors import AlreadyExists, StorageError
from storage.localdisk import storage_error
from storage.sinks import BufferSink

_memory_lock = threading.Lock()


class FsspecStore:
    """The remote half of `storage.files.Store` for URLs that neither local disks nor obstore serve.

    Args:
        url: the root.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # its plug-ins are slow to import

        self._url = url
        # Another process may have written since the last listing, so nothing is cached.
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/")

    def read(self, key: str) -> bytes:
        """See `RemoteStore.read`."""
        with self._errors("reading", key):
            return bytes(self._fs.cat_file(f"{self._root}/{key}"))

    def read_range_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """See `RemoteStore.read_range_into`."""
        with self._errors("reading", key):
            data = self._fs.cat_file(f"{self._root}/{key}", start=offset, end=offset + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See `RemoteStore.put_if_absent`; right for memory:// alone, whose callers share a lock."""
        with self._errors("writing", key), _memory_lock:
            path = f"{self._root}/{key}"
            if self._fs.exists(path):
                raise AlreadyExists(f"{self._url}/{key} is there already, and it is never overwritten")
            self._fs.pipe_file(path, data)

    def replace(self, key: str, data: bytes) -> None:
        """See `RemoteStore.replace`."""
        with self._errors("writing", key):
            self._fs.pipe_file(f"{self._root}/{key}", data)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """See `RemoteStore.list`."""
        with self._errors("listing", prefix):
            listed = self._fs.ls(f"{self._root}/{prefix}", detail=True)
        return [(e["name"].rsplit("/", 1)[1], int(e["size"])) for e in listed if e["type"] == "file"]

    def size(self, key: str) -> int | None:
        """See `RemoteStore.size`."""
        with contextlib.suppress(FileNotFoundError), self._errors("looking at", key):
            return int(self._fs.info(f"{self._root}/{key}")["size"])
        return None

    def delete(self, key: str) -> None:
        """See `RemoteStore.delete`."""
        with contextlib.suppress(FileNotFoundError), self._errors("removing", key):
            self._fs.rm_file(f"{self._root}/{key}")

    def open_read(self, key: str) -> BinaryIO:
        """See `RemoteStore.open_read`."""
        with self._errors("reading", key):
            return cast(BinaryIO, self._fs.open(f"{self._root}/{key}", "rb"))

    def object_sink(self, key: str) -> BufferSink:
        """See `RemoteStore.object_sink`; the whole object is kept in memory."""
        return BufferSink(lambda data: self.put_if_absent(key, data))

    def remove_sinks(self) -> None:
        """See `RemoteStore.remove_sinks`; sinks leave nothing here."""

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        """Clients raise classes of their own, which nobody outside this file should know."""
        try:
            yield
        except (FileNotFoundError, StorageError):
            raise
        except Exception as exc:
            failure: Any = storage_error(doing, f"{self._url}/{key}", exc)
            raise failure from None
