"""Which shapes of engines a run file can ask for, and what is refused until it is tested."""

from __future__ import annotations

from typing import Any

import pytest

from actors.capture.flags import refused_flags
from cluster.config import RunConfig
from cluster.placement import Node, place_engines
from cluster.run_file import load_run
from storage.errors import ConfigError


def run(**engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "prompts": {"url": "p"}, "output": "o", "engine": engine}
    )


def test_tensor_parallel_engines_share_a_node_where_its_gpus_suffice():
    engine = run(gpus=2).engine
    node = Node("n", "host", "127.0.0.1", 8, 8, 1 << 30)
    assert place_engines([node], int(engine.gpus), engine.count) == ["n"] * 4


def test_replicas_in_one_engine_divide_its_gpus():
    assert run(gpus=8, data_parallel=4).engine.data_parallel == 4


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("{gpus: 0, data_parallel: 2}", "gpus is 0 and data_parallel 2; each replica needs GPUs of its own"),
        ("{data_parallel: 2}", "gpus is auto and data_parallel 2"),
        ("{gpus: 8, data_parallel: 3}", "give a multiple of data_parallel"),
        ("{gpus: 8, nodes: 2}", "nodes is 2; one engine over several nodes isn't tested yet"),
        ("{gpus: 8, replicas: 2}", "unknown key engine.replicas"),
    ],
)
def test_what_cant_work_is_refused_before_anything_is_spent(engine: str, said: str, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"{{model: {{path: m}}, prompts: {{url: p}}, output: o, engine: {engine}}}")
    with pytest.raises(ConfigError, match=said):
        load_run(str(path))


def test_sglangs_own_ways_over_nodes_are_refused():
    refused = refused_flags({"nnodes": 2, "use_ray": True})
    assert set(refused) == {"nnodes", "use_ray"}
    assert "without the hook" in refused["use_ray"]
