"""An actor's own log file, under its name: Ray's are named by process and worker ids."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def log_to_file(log_dir: str, name: str) -> None:
    """Sends this process's log, from INFO, to ``log_dir/name.log`` as well; libraries' logs from WARNING.

    Args:
        log_dir: folder on this node; empty keeps no file.
        name: of the actor.
    """
    if not log_dir:
        return
    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{name}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for package in ("actors", "storage"):
        logging.getLogger(package).setLevel(logging.INFO)
    logger.info("%s is process %d", name, os.getpid())
