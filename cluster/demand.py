"""Asks the cluster's autoscaler for nodes. Without one, asking has no effect."""

from __future__ import annotations

from ray.autoscaler.sdk import request_resources

from cluster.config import EngineConfig


class Demand:
    """What a run would have in nodes; the request outlives this process, so it has to be withdrawn.

    Args:
        engine: how many engines the run wants, and whether it waits for nodes.
        gpus: of one engine.
    """

    def __init__(self, engine: EngineConfig, gpus: int) -> None:
        count = 1 if engine.count == "auto" else engine.count
        self._bundles = [{"GPU": gpus} if gpus else {"CPU": 1}] * count if engine.wait_for_nodes_s else []
        self._raised = False

    def raise_(self) -> None:
        """Asks for room for every engine."""
        if self._bundles:
            request_resources(bundles=self._bundles)
            self._raised = True

    def withdraw(self) -> None:
        """Asks for nothing any more: nodes without work may go."""
        if self._raised:
            request_resources(bundles=[])
            self._raised = False
