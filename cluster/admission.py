"""Whether a node may work for a run: asked of each before it gets an engine, at the start and when it joins."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.failures import classify
from cluster.placement import Node
from storage.errors import OutputError, StorageError
from storage.files import Store

_PROBE_FOLDER = ".tmp"
_ANSWER_WITHIN_S = 60.0


class Admission:
    """Asks nodes and judges what they answer.

    Args:
        store: the output.
        run_id: of the run.
        only_on: the node id that alone has to see the output; None when all have to.

    Attributes:
        prompts_urls: node id -> folder that holds prompts/ there, where it isn't the output itself.
    """

    def __init__(self, store: Store, run_id: str, only_on: str | None) -> None:
        self._store = store
        self._run_id = run_id
        self._only_on = only_on
        self._nonces: dict[str, str] = {}
        self.prompts_urls: dict[str, str] = {}

    def admit(self, nodes: Sequence[Node]) -> None:
        """Asks all of them, and waits.

        Raises:
            OutputError: the storage can't keep two writers apart, or nodes don't see the output, by name.
            StorageError: this process itself can't write there.
        """
        self._store.require_put_if_absent()
        asked = {node: self.ask(node) for node in nodes}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_WITHIN_S)
        problems = {node: self.judge(node, ref) for node, ref in asked.items()}
        bad = [f"{node}: {problem}" for node, problem in problems.items() if problem]
        if bad:
            raise OutputError(
                f"output {self._store.url}: not every node can work with it; {'; '.join(bad)}. Use a shared file "
                "system or a bucket, or set writers.place to head to write everything on this machine"
            )

    def ask(self, node: Node) -> ray.ObjectRef:
        """Has the node look at the output, or take a copy of the prompts where it needn't see it."""
        task = ray.remote(_look_at_output if self._sees(node) else _take_prompts).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        )
        if not self._sees(node):
            return task.remote(self._run_id, list(self._prompts), *self._prompts.values())
        nonce = self._nonces[node.node_id] = uuid.uuid4().hex
        self._store.put_if_absent(f"{_PROBE_FOLDER}/probe-{nonce}", nonce.encode())
        return task.remote(self._store, nonce)

    def judge(self, node: Node, ref: ray.ObjectRef) -> str:
        """What is wrong with the node by its answer; empty if it may work for the run."""
        try:
            answer: str = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            answer = f"it didn't answer within {_ANSWER_WITHIN_S:.0f} s"
        except ray.exceptions.RayError as error:
            answer = classify(error).reason
        else:
            if not self._sees(node):
                self.prompts_urls[node.node_id] = answer
                return ""
        nonce = self._nonces.pop(node.node_id, None)
        if nonce is None:
            return answer
        written = f"{_PROBE_FOLDER}/answer-{nonce}"
        if not answer and not self._store.exists(written):
            answer = "what it writes doesn't arrive here"
        for key in (written, f"{_PROBE_FOLDER}/probe-{nonce}"):
            self._store.delete(key)
        return answer

    def _sees(self, node: Node) -> bool:
        return self._only_on in (None, node.node_id)

    @cached_property
    def _prompts(self) -> dict[str, ray.ObjectRef]:
        return {key: ray.put(self._store.read(key)) for key, _ in self._store.list("prompts")}


def _look_at_output(store: Store, nonce: str) -> str:
    """On a node: reads the nonce and answers beside it. Empty when all is well, else what is wrong."""
    try:
        if store.read(f"{_PROBE_FOLDER}/probe-{nonce}") != nonce.encode():
            return "another file is there"
        store.put_if_absent(f"{_PROBE_FOLDER}/answer-{nonce}", b"")
    except FileNotFoundError:
        return "what this machine wrote isn't there"
    except StorageError as error:
        return str(error)
    return ""


def _take_prompts(run_id: str, keys: list[str], *contents: bytes) -> str:
    """On a node: writes the prompts below its temporary folder, which the run doesn't outlive."""
    folder = Path(tempfile.gettempdir()) / f"hsdump-prompts-{run_id}"
    copy = Store(str(folder))
    for key, content in zip(keys, contents, strict=True):
        copy.replace(key, content)
    return str(folder)
