"""Installs a list of packages into a folder of their own, once: python examples/drafter/install.py LIST FOLDER.

Trainers pin other releases of PyTorch, Transformers and SGLang than this environment's, so their dependencies are left
out; what they need of these is here. The folder goes on PYTHONPATH, or at the end of ``sys.path``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def install(packages: Path, folder: Path) -> Path:
    """Makes ``folder``, whole or not at all, unless it holds this list already; returns it."""
    stamp = hashlib.sha256(packages.read_bytes()).hexdigest()
    mark = folder / ".installed"
    if mark.exists() and mark.read_text() == stamp:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
    subprocess.run([*command, "--disable-pip-version-check", "-r", str(packages)], check=True)
    (partial / ".installed").write_text(stamp)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
