"""What a node says of itself before it gets work, and what is wrong with that. Runs on nodes; the rest is pure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.models import local_model
from storage.errors import ModelError, StorageError
from storage.files import Store

PROBE_FOLDER = ".tmp"
_NOT_INSTALLED = "not installed"
_VERSIONED = ("hsdump", "ray", "sglang", "torch")
_GIB = 1 << 30


@dataclass(frozen=True)
class Question:
    """What a node is asked.

    Attributes:
        run_id: of the run.
        store: the output.
        nonce: of the object to be found there; None where the node needn't see the output.
        model: folder, or hub id, of the model; None where the node loads none.
        revision: on the hub.
    """

    run_id: str
    store: Store
    nonce: str | None
    model: str | None
    revision: str | None


@dataclass(frozen=True)
class NodeReport:
    """A node's answer.

    Attributes:
        versions: of Python and the packages that matter; "not installed" where one isn't.
        shm_bytes: size of /dev/shm.
        output_problem: why it doesn't see the output; empty if it does.
        model_problem: why it hasn't got the model; empty if it has.
        prompts_url: folder with its own copy of prompts/; None where it reads the output's.
    """

    versions: Mapping[str, str]
    shm_bytes: int
    output_problem: str = ""
    model_problem: str = ""
    prompts_url: str | None = None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose mixture goes wrong."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = _NOT_INSTALLED
    return found


def look(question: Question, keys: list[str], *prompts: bytes) -> NodeReport:
    """On a node: looks at everything that the run needs of it.

    Args:
        question: what to look at.
        keys: of the prompt files that the node gets a copy of; none where it sees the output.
        prompts: their contents.
    """
    stat = os.statvfs("/dev/shm")
    return NodeReport(
        versions=versions(),
        shm_bytes=stat.f_blocks * stat.f_frsize,
        output_problem=_look_at_output(question.store, question.nonce) if question.nonce else "",
        model_problem=_look_at_model(question) if question.model else "",
        prompts_url=None if question.nonce else take_prompts(question.run_id, keys, *prompts),
    )


def _look_at_output(store: Store, nonce: str) -> str:
    """Reads the nonce and answers beside it."""
    try:
        if store.read(f"{PROBE_FOLDER}/probe-{nonce}") != nonce.encode():
            return "another file is there"
        store.put_if_absent(f"{PROBE_FOLDER}/answer-{nonce}", b"")
    except FileNotFoundError:
        return "what this machine wrote isn't there"
    except StorageError as error:
        return str(error)
    return ""


def _look_at_model(question: Question) -> str:
    """Fetches the model if it has to be; one process a node, since the hub's cache has a lock."""
    try:
        local_model(question.model or "", question.revision)
    except ModelError as error:
        return str(error)
    return ""


def fetched_bytes(model: str) -> int:
    """Bytes of a hub model that are on this node already, whole files and begun ones."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0


def take_prompts(run_id: str, keys: list[str], *contents: bytes) -> str:
    """On a node: writes the prompts below the temporary folder, which the run doesn't outlive."""
    folder = Path(tempfile.gettempdir()) / f"hsdump-prompts-{run_id}"
    copy = Store(str(folder))
    for key, content in zip(keys, contents, strict=True):
        copy.replace(key, content)
    return str(folder)


def problems(
    report: NodeReport, here: Mapping[str, str], object_store_bytes: int, with_model: bool
) -> list[str]:
    """What keeps a node from working for the run, each with the value and the remedy. Pure.

    Args:
        report: the node's.
        here: `versions` of the driver.
        object_store_bytes: of the node.
        with_model: it loads the model, and so needs SGLang and PyTorch as they are here, if they are.
    """
    found = []
    for name, wanted in here.items():
        has = report.versions.get(name, _NOT_INSTALLED)
        if name in ("sglang", "torch") and (not with_model or wanted == _NOT_INSTALLED):
            continue
        if _differ(name, has, wanted):
            found.append(
                f"{name} is {has} there and {wanted} here: install the same version (one image for all nodes does it)"
            )
    if report.shm_bytes < object_store_bytes:
        found.append(
            f"/dev/shm has {report.shm_bytes / _GIB:.1f} GiB and the object store {object_store_bytes / _GIB:.1f} GiB, "
            "which Ray then keeps on the disk: enlarge /dev/shm (docker run --shm-size), or start Ray with a smaller "
            "--object-store-memory"
        )
    if report.output_problem:
        found.append(
            f"it doesn't see the output: {report.output_problem}; use a shared file system or a bucket, or set "
            "writers.place to head to write everything on the driver's machine"
        )
    if report.model_problem:
        found.append(report.model_problem)
    return found


def _differ(name: str, has: str, wanted: str) -> bool:
    """Versions that can't work together: of Python the minor version counts, else all of it."""
    if name == "python":
        return has.split(".")[:2] != wanted.split(".")[:2]
    return has != wanted
