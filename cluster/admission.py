"""Whether a node may work for a run: asked of each before it gets an engine, at the start and when it joins."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.failures import classify
from cluster.node_report import (
    PROBE_FOLDER,
    NodeReport,
    Question,
    fetched_bytes,
    look,
    problems,
    take_prompts,
    versions,
)
from cluster.placement import Node, read_nodes
from cluster.report import say, size
from storage.errors import ResourceError
from storage.files import Store
from storage.prompts import ASKED

_ANSWER_WITHIN_S = 300.0
"""Minutes, since a node's first process may import PyTorch from a cold network disk."""
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Needs:
    """What a run needs of its nodes.

    Attributes:
        gpus: of one engine; a node without so many (or, for 0, without a CPU) gets none.
        model: folder or hub id; None where engines load none.
        revision: the hub's commit.
        only_on: the node id that alone has to see the output; None when all have to.
        fetch_within_s: longest time for the model to arrive on all nodes.
    """

    gpus: int = 0
    model: str | None = None
    revision: str | None = None
    only_on: str | None = None
    fetch_within_s: float = _ANSWER_WITHIN_S

    def engine_on(self, node: Node) -> bool:
        """Whether the node has room for an engine."""
        return node.gpus >= self.gpus if self.gpus else node.cpus > 0


class Admission:
    """Asks nodes and judges what they answer.

    Args:
        store: the output.
        run_id: of the run.
        needs: what is asked of them.

    Attributes:
        prompts_urls: node id -> folder that holds prompts/ there, where it isn't the output itself.
    """

    def __init__(self, store: Store, run_id: str, needs: Needs) -> None:
        self._store = store
        self._run_id = run_id
        self._needs = needs
        self._nonces: dict[str, str] = {}
        self._here = versions()
        self.prompts_urls: dict[str, str] = {}

    def admit(self, nodes: Sequence[Node]) -> None:
        """Asks all of them, and waits until they have answered; says every ten seconds for whom.

        Raises:
            OutputError: the storage can't keep two writers apart.
            ResourceError: nodes can't work for the run: by name, with what is wrong and what to do.
            StorageError: this process itself can't write to the output.
        """
        self._store.require_put_if_absent()
        asked = {self.ask(node): node for node in nodes}
        began_s = time.monotonic()
        within_s = max(_ANSWER_WITHIN_S, self._needs.fetch_within_s if self._needs.model else 0.0)
        waiting = list(asked)
        while waiting and time.monotonic() - began_s < within_s:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_SAY_EVERY_S)
            if waiting:
                self._say_wait([asked[ref] for ref in waiting], time.monotonic() - began_s)
        found = {node: self.judge(node, ref) for ref, node in asked.items()}
        bad = [f"{node}: {problem}" for node, problem in found.items() if problem]
        if bad:
            raise ResourceError(f"{len(bad)} of {len(nodes)} nodes can't work for this run. {'. '.join(bad)}")

    def ask(self, node: Node) -> ray.ObjectRef:
        """Has the node look at itself; `judge` takes the answer."""
        nonce = None
        if self._needs.only_on in (None, node.node_id):
            nonce = self._nonces[node.node_id] = uuid.uuid4().hex
            self._store.put_if_absent(f"{PROBE_FOLDER}/probe-{nonce}", nonce.encode())
        model = self._needs.model if self._needs.engine_on(node) else None
        question = Question(self._run_id, self._store, nonce, model, self._needs.revision)
        prompts = {} if nonce else self._prompts
        return _on(node, look).remote(question, list(prompts), *prompts.values())

    def judge(self, node: Node, ref: ray.ObjectRef) -> str:
        """What is wrong with the node by its answer; empty if it may work for the run."""
        report: NodeReport | None = None
        try:
            report = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            found = ["it didn't answer in time; look at its raylet's log"]
        except ray.exceptions.RayError as error:
            found = [f"it can't be looked at: {classify(error).reason}; is hsdump[service] installed there?"]
        else:
            with_model = self._needs.model is not None and self._needs.engine_on(node)
            found = problems(report, self._here, node.object_store_bytes, with_model)
        nonce = self._nonces.pop(node.node_id, None)
        if nonce is not None:
            found += self._take_answer(nonce, report)
        if report is not None and report.prompts_url is not None:
            self.prompts_urls[node.node_id] = report.prompts_url
        return "; ".join(found)

    def ship_prompts(self) -> None:
        """Brings the prompts, as they are now, to the nodes that have a copy of their own."""
        self.__dict__.pop("_prompts", None)
        wanted = [n for n in read_nodes() if n.node_id in self.prompts_urls]
        prompts = self._prompts if wanted else {}
        asked = [_on(n, take_prompts).remote(self._run_id, list(prompts), *prompts.values()) for n in wanted]
        for node, ref in zip(wanted, asked, strict=True):
            try:
                ray.get(ref, timeout=_ANSWER_WITHIN_S)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                say(f"{node} gets no prompts: {error}")  # its engine fails, and another node has the work

    def _take_answer(self, nonce: str, report: NodeReport | None) -> list[str]:
        """Looks for what the node should have written, and removes both objects."""
        written = f"{PROBE_FOLDER}/answer-{nonce}"
        lost = report is not None and not report.output_problem and not self._store.exists(written)
        for key in (written, f"{PROBE_FOLDER}/probe-{nonce}"):
            self._store.delete(key)
        what = "what it writes to the output doesn't arrive here; use a shared file system or a bucket"
        return [what] if lost else []

    def _say_wait(self, nodes: Sequence[Node], seconds: float) -> None:
        model = self._needs.model
        if model is None:
            say(f"waiting for an answer from {', '.join(map(str, nodes))} for {seconds:.0f} s")
            return
        asked = {_on(node, fetched_bytes).remote(model): node for node in nodes}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_SAY_EVERY_S)
        for ref in done:
            try:
                say(f"{asked[ref]} fetches {model}: {size(ray.get(ref))} after {seconds:.0f} s")
            except ray.exceptions.RayError as error:
                say(f"{asked[ref]} doesn't answer: {classify(error).reason}")

    @cached_property
    def _prompts(self) -> dict[str, ray.ObjectRef]:
        keys = [key for folder in ("prompts", ASKED) for key, _ in self._store.list(folder)]
        return {key: ray.put(self._store.read(key)) for key in keys}


def _on(node: Node, work: Callable[..., Any]) -> ray.remote_function.RemoteFunction:
    """A task that needs nothing and runs there, by a name that the dashboard shows."""
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(work).options(name=f"{work.__name__} @ {node}", num_cpus=0, scheduling_strategy=where)
