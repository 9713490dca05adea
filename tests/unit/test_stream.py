"""A stream over a dump: what it yields, to whom, from where, and within which memory."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_dumps import LAYOUT, head_of, make_dump, states_of
from torch.utils.data import DataLoader

import storage
from storage.errors import ConfigError, CorruptDump
from storage.files import Store
from storage.layout import hidden_key
from storage.manifest import read_manifest

LENGTHS = [5, 9, 30, 64, 1, 17, 8, 22, 40, 3, 11, 12, 33]
ROWS = [row for row in range(len(LENGTHS)) if row != 1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """12 samples in several shards; row 1 is skipped."""
    folder = tmp_path_factory.mktemp("stream")
    make_dump(folder, LENGTHS, skipped=[1], shard_bytes=LAYOUT.sample_bytes(60))
    assert len(list((folder / "manifest").iterdir())) >= 3
    return str(folder)


def expected_states(row: int, ks: list[int]) -> torch.Tensor:
    states = states_of(LAYOUT, row, LENGTHS[row])[ks]
    return torch.from_numpy(states.view("int16")).view(torch.bfloat16).transpose(0, 1)


def rows(items: Iterable[dict[str, Any]]) -> list[int]:
    return [item["row"] for item in items]


def test_a_sequential_stream_gives_every_sample_as_it_was_written(url: str) -> None:
    items = list(storage.DumpStream(url, states=[2, 4]))
    assert rows(items) == ROWS
    for item in items:
        assert item["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(item["hidden_states"], expected_states(item["row"], [1, 2]))
        assert item["input_ids"].tolist() == head_of(item["row"], LENGTHS[item["row"]]).token_ids.tolist()
        assert item["sample_id"] == f"sample {item['row']}/../é"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ends", ["keep", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_an_epoch_without_loss_or_repeats(
    url: str, shuffle: bool, ends: Any, world_size: int
) -> None:
    streams = [
        storage.DumpStream(url, shuffle=shuffle, rank=rank, world_size=world_size, ends=ends)
        for rank in range(world_size)
    ]
    shares = [rows(stream) for stream in streams]
    assert [len(stream) for stream in streams] == [len(part) for part in shares]
    everything = sorted(row for part in shares for row in part)
    if ends == "keep":
        assert everything == ROWS
    else:
        assert {len(part) for part in shares} == {len(ROWS) // world_size}
        assert len(set(everything)) == len(everything)


def test_epochs_differ_and_come_back(url: str) -> None:
    stream = storage.DumpStream(url, shuffle=True, seed=3)
    first = rows(stream)
    assert rows(stream) == first
    stream.set_epoch(1)
    assert rows(stream) != first
    stream.set_epoch(0)
    assert rows(stream) == first
    assert rows(storage.DumpStream(url, shuffle=True, seed=4)) != first


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_share_a_rank_and_keep_its_order(url: str, method: str) -> None:
    """The dump was used before the workers start, and memory of reads is idle."""
    stream = storage.DumpStream(url, shuffle=True, rank=1, world_size=2)
    alone = rows(stream)
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    items = list(loader)
    assert rows(items) == alone
    for item in items:
        assert torch.equal(item["hidden_states"], expected_states(item["row"], [0, 1, 2]))
    stream.set_epoch(1)
    assert rows(loader) == rows(stream) != alone
    assert rows(loader) == rows(stream)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 5, 12])
def test_a_position_goes_on_where_it_was_saved(url: str, shuffle: bool, taken: int) -> None:
    stream = storage.DumpStream(url, shuffle=shuffle)
    stream.set_epoch(2)
    whole = rows(stream)
    iterator = iter(stream)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(stream.state_dict()))
    del iterator
    again = storage.DumpStream(url, shuffle=shuffle)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert rows(again) == whole[taken:]
    assert rows(again) == whole  # the next pass is a whole one


def test_a_position_of_a_past_epoch_does_not_shorten_the_next(url: str) -> None:
    stream = storage.DumpStream(url)
    stream.load_state_dict(stream.state_after(7))
    stream.set_epoch(1)
    assert stream.state_dict()["start"] == 0
    assert rows(stream) == ROWS


def test_a_pass_that_was_left_starts_again_from_its_beginning(url: str) -> None:
    stream = storage.DumpStream(url)
    next(iter(stream))
    assert rows(stream) == ROWS


def test_another_number_of_ranks_takes_a_position_up_without_loss_or_repeats(url: str) -> None:
    two = [storage.DumpStream(url, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    seen = []
    for stream in two:
        iterator = iter(stream)
        seen += [next(iterator)["row"] for _ in range(2)]
    assert two[0].state_dict() == two[1].state_dict()
    rest = []
    for rank in range(3):
        stream = storage.DumpStream(url, shuffle=True, rank=rank, world_size=3)
        stream.load_state_dict(two[0].state_dict())
        rest += rows(stream)
    assert sorted(seen + rest) == ROWS


def test_a_plain_loader_with_workers_resumes_from_what_the_loop_counted(url: str) -> None:
    stream = storage.DumpStream(url, shuffle=True)
    whole = rows(stream)
    again = storage.DumpStream(url, shuffle=True)
    again.load_state_dict(stream.state_after(5))
    loader: DataLoader[Any] = DataLoader(
        again, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    assert rows(loader) == whole[5:]
    assert again.state_after(3) == stream.state_after(8)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_saves_and_restores_it(url: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        context = "fork" if workers else None
        stream = storage.DumpStream(url, shuffle=True)
        return stateful(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)

    whole = rows(loader())
    first = loader()
    iterator = iter(first)
    seen = [next(iterator)["row"] for _ in range(5)]
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert seen + rows(second) == whole


def test_a_position_of_another_order_is_refused_with_what_differs(url: str, tmp_path: Path) -> None:
    state = storage.DumpStream(url, shuffle=True, seed=1).state_dict()
    with pytest.raises(ConfigError, match=r"seed: 2 here, 1 in the state; shuffle: False here, True"):
        storage.DumpStream(url, seed=2).load_state_dict(state)
    make_dump(tmp_path, LENGTHS[:4])
    with pytest.raises(ConfigError, match=r"samples: 4 here, 12 in the state"):
        storage.DumpStream(str(tmp_path), shuffle=True, seed=1).load_state_dict(state)


def test_packs_hold_samples_after_each_other(url: str) -> None:
    stream = storage.DumpStream(url, states=["final", 0], pack_tokens=70)
    items = list(stream)
    assert len(items) == len(stream) < len(ROWS)
    assert sorted(row for item in items for row in item["rows"]) == ROWS
    for item in items:
        ends = item["cu_seqlens"].tolist()
        assert item["cu_seqlens"].dtype == torch.int32
        assert (
            ends[-1] == len(item["input_ids"]) == len(item["loss_mask"]) == len(item["hidden_states"]) <= 70
        )
        for row, sample_id, a, b in zip(item["rows"], item["sample_ids"], ends, ends[1:], strict=False):
            assert sample_id == f"sample {row}/../é"
            assert item["input_ids"][a:b].tolist() == head_of(row, LENGTHS[row]).token_ids.tolist()
            assert item["position_ids"][a:b].tolist() == list(range(LENGTHS[row]))
            assert torch.equal(item["hidden_states"][a:b], expected_states(row, [2, 0]))
    with pytest.raises(ConfigError, match="the longest sample has 64"):
        list(storage.DumpStream(url, pack_tokens=63))


def test_packs_are_shared_and_resumed_like_samples(url: str) -> None:
    streams = [storage.DumpStream(url, shuffle=True, pack_tokens=64, rank=r, world_size=2) for r in range(2)]
    packs = [[item["rows"] for item in stream] for stream in streams]
    assert sorted(row for part in packs for pack in part for row in pack) == ROWS
    streams[0].load_state_dict(streams[1].state_after(1))
    assert [item["rows"] for item in streams[0]] == packs[0][1:]


@pytest.mark.parametrize("budget", [1, LAYOUT.sample_bytes(64), 1 << 20])
def test_no_more_is_read_ahead_than_the_budget_says(
    url: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read and not yet yielded is counted by the bytes of states that reads were asked for."""
    asked: list[int] = []
    lock = threading.Lock()
    real = Store.read_range_into

    def counted(self: Store, key: str, offset: int, buffer: memoryview, *seen: Any) -> None:
        if key.startswith("hidden"):
            with lock:
                asked.append(len(buffer))
        real(self, key, offset, buffer, *seen)

    monkeypatch.setattr(Store, "read_range_into", counted)
    had = most = 0
    for item in storage.DumpStream(url, prefetch_bytes=budget, threads=2):
        size = LAYOUT.sample_bytes(len(item["input_ids"]))
        most = max(most, sum(asked) - had)
        had += size
        # This item counts as well while it is looked at.
        assert sum(asked) - had <= max(budget, LAYOUT.sample_bytes(64))
    assert had == sum(asked)
    assert budget != 1 << 20 or most > LAYOUT.sample_bytes(64)


def test_only_the_wanted_states_are_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = Store.read_range_into

    def counted(self: Store, key: str, offset: int, buffer: memoryview, *seen: Any) -> None:
        if key.startswith("hidden"):
            reads.append(len(buffer))
        real(self, key, offset, buffer, *seen)

    monkeypatch.setattr(Store, "read_range_into", counted)
    list(storage.DumpStream(url, states=[2]))
    assert sum(reads) == sum(LAYOUT.sample_bytes(LENGTHS[row]) for row in ROWS) // 3


def test_a_read_that_fails_comes_out_at_its_place_and_ends_the_threads(tmp_path: Path) -> None:
    make_dump(tmp_path, LENGTHS, shard_bytes=LAYOUT.sample_bytes(60))
    (tmp_path / hidden_key(1)).unlink()
    iterator = iter(storage.DumpStream(str(tmp_path)))
    before = len(read_manifest(Store(str(tmp_path)), 0).samples)
    assert rows(itertools.islice(iterator, before)) == list(range(before))
    with pytest.raises(CorruptDump, match=r"hidden/c/1/0/0 is gone"):
        next(iterator)
    assert not [t for t in threading.enumerate() if t.name.startswith("hsdump-read")]


def test_a_stream_that_is_left_ends_its_threads(url: str) -> None:
    for _ in storage.DumpStream(url):
        break
    assert not [t for t in threading.enumerate() if t.name.startswith("hsdump-read")]


def test_values_out_of_range_are_refused(url: str) -> None:
    for bad in ({"rank": 2, "world_size": 2}, {"window": 0}, {"threads": 0}, {"ends": "repeat"}):
        with pytest.raises(ConfigError):
            storage.DumpStream(url, **bad)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="7 isn't among them"):
        next(iter(storage.DumpStream(url, states=[7])))


def test_a_forked_loader_reads_through_the_map_style_dataset_too(url: str) -> None:
    dataset = storage.DumpDataset(url)
    assert len(dataset) == len(ROWS)
    dataset[0]
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    for item in loader:
        assert torch.equal(item["hidden_states"], expected_states(item["row"], [0, 1, 2]))
