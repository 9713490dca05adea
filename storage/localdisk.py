"""What a local disk needs so that an object appears whole or not at all, and only once.

An object is written under a temporary name on the same file system, fsynced, linked to its final name
(link(2) never overwrites), and the directory is fsynced. A process that is killed at any point leaves at most
a temporary file, which no reader looks at.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import AlreadyExists, StorageError, StorageFull

TEMPORARIES = ".tmp"
"""Folder below the root that holds objects while they are written."""
SINK_SUFFIX = ".sink"
"""Of temporary files that are written piece by piece."""
PUT_SUFFIX = ".put"
"""Of temporary files that are written at once."""
SEEN_BYTES = 1 << 20
"""Read at a time by a reader that looks at what it reads: still in the processor's cache when it does."""
DIRECT_READ_BYTES = 8 << 20
"""Read at a time past the page cache, where nothing reads ahead."""
BLOCK_BYTES = 4096
"""Alignment that O_DIRECT wants of offset, length and memory on every common disk."""
Seen = Callable[[memoryview], None]
"""Is told of bytes that were read."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""SYNC_FILE_RANGE_* of Linux."""
_libc = ctypes.CDLL(None)


def storage_error(doing: str, where: str, exc: BaseException, root: Path | None = None) -> StorageError:
    """The project's error for an operating system's one.

    Args:
        doing: what failed, as a verb in -ing form.
        where: path or URL.
        exc: the cause.
        root: folder whose file system's free space is named when it is full.
    """
    if isinstance(exc, StorageError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        free = "unknown" if root is None else str(free_bytes(root))
        why = "quota exceeded" if exc.errno == errno.EDQUOT else "no space left"
        return StorageFull(
            f"{doing} {where}: {why} (free bytes: {free}). Free some space or move the dump to a larger "
            "disk, then run the same command again: what is committed stays"
        )
    return StorageError(f"{doing} {where} failed: {exc}")


def free_bytes(root: Path) -> int:
    """Bytes that an unprivileged process may still write at ``root`` or at its nearest existing parent."""
    while not root.exists() and root != root.parent:
        root = root.parent
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def fsync_dir(folder: Path) -> None:
    """Makes the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(folder: Path) -> list[Path]:
    """Creates ``folder`` with its parents; returns the folders that got a name, lowest first, to be fsynced."""
    if folder.is_dir():
        return []
    above = make_dirs(folder.parent)
    folder.mkdir(exist_ok=True)
    return [folder.parent, *above]


def temporary(root: Path, suffix: str) -> Path:
    """A new name for a temporary file below ``root``."""
    folder = root / TEMPORARIES
    _fsync_dirs(make_dirs(folder))
    return folder / f"{uuid.uuid4().hex}{suffix}"


def write_temporary(root: Path, data: bytes) -> Path:
    """Writes ``data`` durably under a temporary name and returns it."""
    path = temporary(root, PUT_SUFFIX)
    try:
        with open(path, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def publish_if_absent(temp: Path, final: Path) -> None:
    """Gives a durable temporary file its final name unless that is taken; the temporary name is gone after.

    Raises:
        AlreadyExists: ``final`` is there already.
        OSError: anything else.
    """
    changed = [final.parent, *make_dirs(final.parent)]
    try:
        os.link(temp, final)
    except FileExistsError:
        # Over NFS a repeated request reports EEXIST for the link that its first try made; open(2) says to
        # count the links.
        if os.stat(temp).st_nlink != 2:
            raise AlreadyExists(f"{final} is there already, and it is never overwritten") from None
    finally:
        temp.unlink(missing_ok=True)
    _fsync_dirs(changed)


def publish_over(temp: Path, final: Path) -> None:
    """Gives a durable temporary file its final name, whatever was there before."""
    changed = [final.parent, *make_dirs(final.parent)]
    os.replace(temp, final)
    _fsync_dirs(changed)


def _fsync_dirs(folders: Sequence[Path]) -> None:
    """Makes new names durable, all after the last was made: the first fsync commits the journal for all of them."""
    for folder in folders:
        fsync_dir(folder)


def allocate(fd: int, end: int) -> None:
    """Gives a file space, and a size, up to byte ``end`` where the file system can; else nothing happens.

    Not `os.posix_fallocate`, which writes into every block where the file system can't. A disk that is nearly
    full is left alone: what isn't written in the end may be what another file needs.
    """
    fallocate = getattr(_libc, "fallocate", None)
    stat = os.fstatvfs(fd)
    if fallocate is not None and stat.f_bavail * stat.f_frsize > 4 * (end - os.fstat(fd).st_size):
        fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(end))


def has_block_device(fd: int) -> bool:
    """Whether a file is on a device of blocks rather than in memory, on a network or in a layer over others."""
    return os.major(os.fstat(fd).st_dev) != 0


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Starts writing dirty pages to the disk without waiting for it."""
    _sync_file_range(fd, offset, length, _WRITE)


def finish_writeback(fd: int, offset: int, length: int) -> None:
    """Waits until a range's dirty pages are on the disk and lets the page cache drop them."""
    _sync_file_range(fd, offset, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    """sync_file_range(2). It only paces the writing; errors come out of the fsync at the end."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags))


def pread_into(path: Path, offset: int, buffer: memoryview, seen: Seen | None = None) -> int:
    """Reads up to ``len(buffer)`` bytes from ``offset``; returns how many there were.

    Args:
        path: the file.
        offset: of its first byte that is wanted.
        buffer: bytes, writable.
        seen: told of each piece as soon as it is there, in order.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return _pread(fd, offset, buffer, len(buffer) if seen is None else SEEN_BYTES, seen)
    finally:
        os.close(fd)


def pread_direct_into(path: Path, offset: int, buffer: memoryview, seen: Seen | None = None) -> int:
    """As `pread_into`, but past the page cache where the file system and the range allow it.

    That takes whole blocks of the file and of memory; other ranges, those of small objects say, and what is left of a
    file that ends too early are read as usual.
    """
    done = _pread_blocks(path, offset, buffer, seen) if buffer else 0
    if done == len(buffer):
        return done
    return done + pread_into(path, offset + done, buffer[done:], seen)


def _pread_blocks(path: Path, offset: int, buffer: memoryview, seen: Seen | None) -> int:
    """Reads whole blocks past the page cache; 0 where that can't be."""
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    if any(n % BLOCK_BYTES for n in (offset, len(buffer), address)):
        return 0
    fd = open_direct(path, os.O_RDONLY)
    if fd is None:
        return 0
    try:
        there = max(os.fstat(fd).st_size - offset, 0) // BLOCK_BYTES * BLOCK_BYTES
        return _pread(fd, offset, buffer[:there], DIRECT_READ_BYTES, seen)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return 0  # opened but not readable that way: this file system has no O_DIRECT after all
    finally:
        os.close(fd)


def _pread(fd: int, offset: int, buffer: memoryview, piece_bytes: int, seen: Seen | None) -> int:
    """Fills ``buffer`` in pieces until the file ends; returns how many bytes there were."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done : done + piece_bytes]], offset + done)
        if got == 0:
            break
        if seen is not None:
            seen(buffer[done : done + got])
        done += got
    return done


def open_direct(path: Path, access: int) -> int | None:
    """Opens a file for reads or writes past the page cache; None where its file system has none.

    Args:
        path: the file.
        access: ``os.O_RDONLY`` or ``os.O_WRONLY``.
    """
    flag: Any = getattr(os, "O_DIRECT", None)  # absent outside Linux
    if flag is None:
        return None
    try:
        return os.open(path, access | flag | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise


def remove_sinks(root: Path) -> None:
    """Removes what writers that died have left behind; small puts, which may be going on, are left alone."""
    for path in (root / TEMPORARIES).glob(f"*{SINK_SUFFIX}"):
        path.unlink(missing_ok=True)
