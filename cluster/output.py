"""The output of a run: where it is, whose it is, and whether every node sees the same one."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import local_path
from cluster.placement import Node
from storage.errors import OutputError, StorageError
from storage.files import Store

_PROBE_FOLDER = ".tmp"
_PROBE_WAIT_S = 60.0


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


def check_nodes_see(store: Store, nodes: Sequence[Node]) -> None:
    """Shows that every node reads what this process wrote to the output, and this process what they write.

    Raises:
        OutputError: names the nodes that see another place, or the storage can't keep two writers apart.
        StorageError: this process itself can't write there.
    """
    store.require_put_if_absent()
    nonce = uuid.uuid4().hex
    asked = f"{_PROBE_FOLDER}/probe-{nonce}"
    store.put_if_absent(asked, nonce.encode())
    task = ray.remote(_answer_probe)
    calls = {
        node: task.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ).remote(store, nonce, node.node_id)
        for node in nodes
    }
    blind = []
    for node, call in calls.items():
        answer = f"{asked}-{node.node_id}"
        try:
            seen = ray.get(call, timeout=_PROBE_WAIT_S)
        except (ray.exceptions.RayError, StorageError) as error:
            seen = str(error).strip().splitlines()[-1]
        if seen or not store.exists(answer):
            blind.append(f"{node.hostname} ({node.address}){': ' + seen if seen else ''}")
        else:
            store.delete(answer)
    store.delete(asked)
    if blind:
        raise OutputError(
            f"output {store.url}: not the same place on every node; it isn't seen by {'; '.join(blind)}. Use a "
            "shared file system or a bucket, or set writers.place to head to write everything on this machine"
        )


def _answer_probe(store: Store, nonce: str, node_id: str) -> str:
    """On a node: reads the nonce and answers beside it. Empty when all is well, else what is wrong."""
    try:
        if store.read(f"{_PROBE_FOLDER}/probe-{nonce}") != nonce.encode():
            return "another file is there"
        store.put_if_absent(f"{_PROBE_FOLDER}/probe-{nonce}-{node_id}", b"")
    except FileNotFoundError:
        return "what this machine wrote isn't there"
    except StorageError as error:
        return str(error)
    return ""


def ship_prompts(store: Store, nodes: Sequence[Node], run_id: str) -> dict[str, str]:
    """Copies the prepared prompts to nodes that don't see the output.

    Returns:
        Node id -> folder there that holds ``prompts/``.

    Raises:
        OutputError: a node can't take the copy.
    """
    files = {key: ray.put(store.read(key)) for key, _ in store.list("prompts")}
    task = ray.remote(_take_prompts)
    calls = {
        node: task.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ).remote(run_id, list(files), *files.values())
        for node in nodes
    }
    try:
        return {node.node_id: ray.get(call) for node, call in calls.items()}
    except ray.exceptions.RayError as error:
        raise OutputError(
            f"the prompts of {store.url} can't be copied to every node: {str(error).strip().splitlines()[-1]}"
        ) from error


def _take_prompts(run_id: str, keys: list[str], *contents: bytes) -> str:
    """On a node: writes the prompts below its temporary folder, which the run doesn't outlive."""
    folder = Path(tempfile.gettempdir()) / f"hsdump-prompts-{run_id}"
    copy = Store(str(folder))
    for key, content in zip(keys, contents, strict=True):
        copy.replace(key, content)
    return str(folder)
