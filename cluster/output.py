"""The output of a run: where it is."""

from __future__ import annotations

from pathlib import Path

from cluster.run_file import local_path
from storage.errors import OutputError
from storage.files import Store


def open_output(url: str, start: Path) -> Store:
    """The store that a run writes to.

    Args:
        url: as the run file has it.
        start: folder that a relative path starts from: where the user typed the command.

    Raises:
        OutputError: a place that can't hold a dump, or that would be lost with the job.
    """
    if url.startswith("memory://"):
        raise OutputError(f"output {url}: memory is gone with the process; give a folder or a bucket")
    if "://" not in url and not Path(url).expanduser().is_absolute() and "runtime_resources" in start.parts:
        raise OutputError(
            f"output {url}: a relative path inside a job starts in Ray's temporary copy of the working directory, "
            "which is deleted with the job; give an absolute path or a bucket (--set output=/data/dump)"
        )
    store = Store(local_path(url, start))
    root = store.local_root
    if root is not None and root.exists() and not root.is_dir():
        raise OutputError(f"output {root}: is a file; give a folder")
    return store
