"""A trainer's view of a dump."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_dumps import LAYOUT, head_of, make_dump, states_of
from torch.utils.data import DataLoader

import storage
from storage import localdisk
from storage.errors import CorruptDump, OutputError
from storage.files import Store
from storage.layout import Layout, hidden_key

LENGTHS = [5, 9, 30, 64, 1]


def as_torch(states: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)


@pytest.fixture(params=["finished", "unfinished", "memory"])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> storage.Dump:
    url = f"memory://{request.node.name}" if request.param == "memory" else str(tmp_path)
    make_dump(url, LENGTHS, skipped=[1], finish=request.param != "unfinished")
    return storage.open_dump(url)


def test_samples_come_back_as_they_were_written(dump: storage.Dump) -> None:
    rows = [0, 2, 3, 4]
    assert len(dump) == 4
    assert [sample.row for sample in dump] == rows
    for number, row in enumerate(rows):
        sample, tokens = dump[number], LENGTHS[row]
        head, states = head_of(row, tokens), as_torch(states_of(LAYOUT, row, tokens))
        assert sample.boundaries == (0, 2)
        assert sample.token_ids.dtype == torch.int64
        assert sample.token_ids.tolist() == head.token_ids.tolist()
        assert sample.loss_mask.dtype == torch.bool
        assert sample.loss_mask.tolist() == head.loss_mask.astype(bool).tolist()
        for k, state in enumerate((0, 2, "final")):
            assert torch.equal(sample.states(state), states[k])
        assert torch.equal(sample.states(4), states[2])
        assert sample.stack().shape == (tokens, 3, 16)
        assert torch.equal(sample.stack(), states.transpose(0, 1))
        assert torch.equal(sample.stack(["final", 0]), states[[2, 0]].transpose(0, 1))


def test_samples_are_found_by_number_from_both_ends_and_by_id(dump: storage.Dump) -> None:
    assert dump[-1].row == dump[3].row == 4
    assert dump["sample 2/../é"].row == 2
    assert "sample 2/../é" in dump
    assert "sample 1/../é" not in dump
    with pytest.raises(IndexError):
        dump[4]
    with pytest.raises(KeyError, match=r"no committed sample 'sample 22/../é'.*'sample 2/../é'"):
        dump["sample 22/../é"]


def test_a_state_that_is_not_held_is_refused_with_what_is(dump: storage.Dump) -> None:
    with pytest.raises(KeyError, match="holds the states 0, 2, final; 3 isn't"):
        dump[0].states(3)
    with pytest.raises(KeyError, match="final_normed"):
        dump[0].states("final_normed")


def test_the_table_tells_of_skipped_rows_too(tmp_path: Path) -> None:
    make_dump(tmp_path, LENGTHS, skipped=[1])
    assert storage.open_dump(str(tmp_path)).samples["status"].to_pylist().count("skipped") == 1


@pytest.mark.parametrize(("dtype", "expected"), [("float16", torch.float16), ("float32", torch.float32)])
def test_other_element_types_come_back_as_such(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    layout = Layout(states=(1,), hidden_size=16, dtype=dtype, chunk_rows=4, shard_rows=64)
    make_dump(tmp_path, [7], layout=layout)
    states = storage.open_dump(str(tmp_path))[0].states(1)
    assert states.dtype == expected
    bits = states.view(torch.int16 if dtype == "float16" else torch.int32).numpy().view(layout.storage_dtype)
    assert np.array_equal(bits, states_of(layout, 0, 7)[0])


def test_one_state_is_one_read_of_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dump(tmp_path, LENGTHS)
    sample = storage.open_dump(str(tmp_path))[2]
    reads: list[int] = []
    real = Store.read_range_into

    def counted(self: Store, key: str, offset: int, buffer: memoryview, *seen: Any) -> None:
        reads.append(len(buffer))
        real(self, key, offset, buffer, *seen)

    monkeypatch.setattr(Store, "read_range_into", counted)
    sample.states(2)
    assert reads == [30 * LAYOUT.row_bytes]
    sample.stack()
    assert reads[1:] == [LAYOUT.sample_bytes(30)]


@pytest.mark.parametrize(
    ("states", "runs"),
    [
        ([0, 2], [2]),
        ([2, "final"], [2]),
        ([0, 4], [1, 1]),
        (["final", 0, 2], [1, 2]),
        ([2, 2], [1, 1]),
        ([], []),
    ],
)
def test_wanted_states_are_read_alone_and_neighbours_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[Any], runs: list[int]
) -> None:
    make_dump(tmp_path, LENGTHS)
    sample = storage.open_dump(str(tmp_path))[2]
    reads: list[int] = []
    real = Store.read_range_into

    def counted(self: Store, key: str, offset: int, buffer: memoryview, *seen: Any) -> None:
        reads.append(len(buffer))
        real(self, key, offset, buffer, *seen)

    monkeypatch.setattr(Store, "read_range_into", counted)
    stacked = sample.stack(states)
    assert reads == [count * LAYOUT.slots(30) * LAYOUT.chunk_bytes for count in runs]
    order = [{0: 0, 2: 1, 4: 2, "final": 2}[state] for state in states]
    assert torch.equal(stacked, as_torch(states_of(LAYOUT, 2, 30))[order].transpose(0, 1))


@pytest.mark.parametrize("piece_bytes", [7, 500, 1 << 20])
def test_a_wrong_byte_is_noticed_wherever_the_pieces_end_that_a_state_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    make_dump(tmp_path, LENGTHS)
    monkeypatch.setattr(localdisk, "SEEN_BYTES", piece_bytes)
    sample = storage.open_dump(str(tmp_path))[3]
    good = sample.stack()
    assert torch.equal(good, as_torch(states_of(LAYOUT, 3, 64)).transpose(0, 1))
    shard = tmp_path / hidden_key(sample.shard)
    data = bytearray(shard.read_bytes())
    at = LAYOUT.run_offset(sample.offset, LAYOUT.slots(64), 1, 63)
    data[at] ^= 1
    shard.write_bytes(data)
    assert torch.equal(sample.states(0), good[:, 0])
    for read in (sample.stack, lambda: sample.states(2)):
        with pytest.raises(
            CorruptDump, match=r"state 2 of sample 'sample 3/../é' .*isn't what was committed"
        ):
            read()


def test_a_dump_and_its_samples_can_be_pickled(dump: storage.Dump) -> None:
    assert torch.equal(pickle.loads(pickle.dumps(dump))[1].stack(), dump[1].stack())
    assert torch.equal(pickle.loads(pickle.dumps(dump[1])).stack(), dump[1].stack())


def test_no_dump_and_missing_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no dump here"):
        storage.open_dump(str(tmp_path / "nothing"))
    make_dump(tmp_path, LENGTHS)
    dump = storage.open_dump(str(tmp_path))
    (tmp_path / hidden_key(0)).unlink()
    with pytest.raises(CorruptDump, match=r"hidden/c/0/0/0 is gone"):
        dump[0].stack()


def test_a_dataloader_with_spawned_workers_reads_every_sample(tmp_path: Path) -> None:
    make_dump(tmp_path, LENGTHS, skipped=[1])
    dataset = storage.DumpDataset(str(tmp_path), states=[2, 4])
    assert len(dataset) == 4  # it was used before it is pickled
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn", shuffle=True
    )
    items = sorted(loader, key=lambda item: item["row"])
    assert [item["row"] for item in items] == [0, 2, 3, 4]
    for item in items:
        row = item["row"]
        states = as_torch(states_of(LAYOUT, row, LENGTHS[row]))[[1, 2]].transpose(0, 1)
        assert torch.equal(item["hidden_states"], states)
        assert item["input_ids"].tolist() == head_of(row, LENGTHS[row]).token_ids.tolist()
        assert item["loss_mask"].shape == item["input_ids"].shape
        assert item["sample_id"] == f"sample {row}/../é"


def test_a_dataset_pickles_before_and_after_use_and_refuses_unknown_states(tmp_path: Path) -> None:
    make_dump(tmp_path, LENGTHS)
    dataset = storage.DumpDataset(str(tmp_path))
    for _ in range(2):
        again = pickle.loads(pickle.dumps(dataset))
        assert again[0]["hidden_states"].shape == (5, 3, 16)
        assert len(dataset) == 5
    with pytest.raises(KeyError, match="7 isn't among them"):
        len(storage.DumpDataset(str(tmp_path), states=[7]))
