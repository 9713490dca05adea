"""Keeps out of /dev/shm what a killed process couldn't remove: nothing of an engine may be left there.

Engines are killed, not asked: by the kernel with their parent, by Ray with their actor. Whatever has a name in
/dev/shm would then stay until the machine restarts.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from actors.capture import adapter


def unname_progress_lock() -> None:
    """Gives tqdm a lock without a name.

    tqdm makes a lock for other processes at its first bar. Under the start method ``spawn`` that is a named
    semaphore, since a child might look it up; under ``fork`` multiprocessing removes the name at once.
    """
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = multiprocessing.get_context("fork").RLock()


def move_load_snapshot(folder: Path) -> None:
    """Has SGLang keep its load snapshot below ``folder``.

    A scheduler publishes its load for routers in ``/dev/shm/sglang_loads_*`` and never removes the file. Nobody
    asks for it here; a reader that doesn't find it goes on without.
    """
    snapshots = adapter.load_snapshots()
    if snapshots is not None:
        named: Any = snapshots.shm_path_for
        snapshots.shm_path_for = lambda ipc_name: str(folder / Path(named(ipc_name)).name)
