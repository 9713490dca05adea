"""Checks of a dump as tasks of a cluster: on all its nodes, with the same result as in one process."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import ray.cloudpickle
from made_dumps import LAYOUT, make_dump
from ray.cluster_utils import Cluster

from cluster import spread as spreading
from cluster.cli import run_cli
from cluster.spread import spread
from storage.errors import OutputError
from storage.files import Store
from storage.layout import hidden_key
from storage.manifest import read_manifests
from storage.verify import run_item, work_items

pytestmark = pytest.mark.slow

LENGTHS = [5, 9, 30, 7, 20, 3, 11, 40, 1, 2] * 3


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_dump(tmp_path / "dump", LENGTHS, shard_bytes=LAYOUT.sample_bytes(30))


def meet(item: tuple[int, str]) -> tuple[int, str]:
    """Ends once a second item is being worked on; as each takes a whole CPU, that is on the other node."""
    number, folder = item
    (Path(folder) / str(number)).touch()
    deadline_s = time.monotonic() + 120
    while len(list(Path(folder).iterdir())) < 2:
        assert time.monotonic() < deadline_s, "no other item was worked on at the same time"
        time.sleep(0.05)
    return number, ray.get_runtime_context().get_node_id()


def test_all_items_are_worked_on_by_all_nodes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreading, "TASKS_AT_A_TIME", 4)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import the tests
    results = list(spread(meet, [(number, str(tmp_path)) for number in range(20)], address))
    assert sorted(number for number, _ in results) == list(range(20))
    assert len({node for _, node in results}) == 2


def test_the_command_finds_on_a_cluster_what_it_finds_alone(
    address: str, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.progress.LINE_EVERY_S", math.inf)
    assert len(work_items(store)) > 5
    for shard in (1, 3):
        sample = read_manifests(store)[shard].samples[0]
        data = bytearray(store.read(hidden_key(shard)))
        data[sample.offset] ^= 1
        store.replace(hidden_key(shard), bytes(data))
    for options in ([], ["--sample-fraction", "0.5", "--seed", "3"]):
        alone = run_cli(["verify", store.url, *options]), capsys.readouterr().out
        spread_out = run_cli(["verify", store.url, *options, "--address", address]), capsys.readouterr().out
        assert spread_out == alone
        assert alone[0] != 0 or options
    assert "30 samples of 30" not in alone[1]
    assert "15 samples of 30 (fraction 0.5, seed 3)" in alone[1]


def test_a_node_that_does_not_see_the_dump_says_so(address: str, store: Store) -> None:
    items = work_items(store)
    shutil.rmtree(store.url)
    with pytest.raises(OutputError, match=r"on node .*there is no dump here.*must see the dump"):
        list(spread(run_item, items, address))
