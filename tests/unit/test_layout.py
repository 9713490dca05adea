"""Geometry: where bytes are, and what metadata says about it."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from storage.layout import MISSING, Layout, ShardIndex, shard_rows_for

LAYOUT = Layout((3, 31, 59, "final_normed"), hidden_size=7168)


def test_four_bfloat16_states_of_7168_make_57344_bytes_a_token() -> None:
    assert LAYOUT.bytes_per_token == 57_344
    assert LAYOUT.chunk_bytes == 32 * 7168 * 2
    assert LAYOUT.sample_bytes(33) == 64 * 57_344
    assert [LAYOUT.slots(t) for t in (1, 32, 33)] == [1, 1, 2]


def test_a_sample_is_stored_state_by_state() -> None:
    first, second = (LAYOUT.run_offset(1000, 2, k, 0) for k in (0, 1))
    assert (first, second) == (1000, 1000 + 64 * 14_336)
    assert LAYOUT.run_offset(1000, 2, 1, 5) == second + 5 * 14_336
    assert LAYOUT.array_start(shard=2, first_slot=3) == 2 * 16_384 + 96


def test_a_layout_survives_json_and_bad_ones_are_refused() -> None:
    assert Layout.from_json(LAYOUT.to_json()) == LAYOUT
    for bad, message in [
        ({"states": ()}, "at least one state"),
        ({"dtype": "float8"}, "not float8"),
        ({"shard_rows": 100}, "shard_rows 100"),
    ]:
        with pytest.raises(ValueError, match=message):
            Layout(**{"states": (1,), "hidden_size": 8, **bad})  # type: ignore[arg-type]


def test_asking_for_a_state_that_is_not_held_lists_what_is() -> None:
    assert LAYOUT.state_index("final_normed") == 3
    with pytest.raises(KeyError, match="holds the states 3, 31, 59, final_normed; 4 isn't"):
        LAYOUT.state_index(4)


@pytest.mark.parametrize(
    ("longest", "rows"), [(1, 16_384), (16_384, 16_384), (16_385, 32_768), (100_000, 131_072)]
)
def test_a_shard_has_room_for_the_longest_sample(longest: int, rows: int) -> None:
    assert shard_rows_for(longest) == rows


def test_an_index_has_an_entry_for_each_chunk_and_a_checksum() -> None:
    layout = Layout((1, 2), hidden_size=8, chunk_rows=4, shard_rows=20)
    index = ShardIndex(layout)
    index.add(first_slot=1, slots=2, offset=640)
    data = index.to_bytes()
    assert len(data) == layout.index_bytes
    assert int.from_bytes(data[-4:], "little") == google_crc32c.value(data[:-4])
    entries = np.frombuffer(data[:-4], "<u8").reshape(5, 2, 2)
    assert np.all(entries[[0, 3, 4]] == MISSING)
    assert entries[1:3, :, 0].tolist() == [[640, 640 + 128], [640 + 64, 640 + 192]]
    assert np.all(entries[1:3, :, 1] == layout.chunk_bytes)
    with pytest.raises(ValueError, match="already taken"):
        index.add(first_slot=2, slots=1, offset=0)
