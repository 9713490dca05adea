"""The map of ids that a preparation keeps: as a dictionary would, in less memory."""

from __future__ import annotations

import tracemalloc

import numpy as np

from storage.prompts.account import IdBook
from storage.prompts.digests import DigestMap


def test_map_holds_what_a_dictionary_holds() -> None:
    rng = np.random.default_rng(0)
    # Few different low bits: most keys collide.
    keys = (rng.integers(0, 1 << 40, 3000).astype(np.uint64) << np.uint64(20)) + rng.integers(
        0, 7, 3000
    ).astype(np.uint64)
    keys[0], keys[1] = 0, (1 << 64) - 1
    book, model = DigestMap(), {}
    for row, key in enumerate(np.concatenate([keys, keys[:500]]).tolist()):
        book.set(key, row * 3, row)
        model[key] = (row * 3, row)
    assert len(book) == len(model)
    assert all(book.get(key) == value for key, value in model.items())
    assert book.get(12345) is None


def test_an_id_more_takes_less_than_a_hundred_bytes() -> None:
    book = IdBook()
    tracemalloc.start()
    for row in range(50_000):
        book.claim(f"row {row}", f"{row:032x}", row)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / 50_000 < 100


def test_repeats_are_found_among_many_ids() -> None:
    book = IdBook()
    for row in range(5000):
        assert not book.claim(f"row {row}", f"{row + 1:016x}{0:016x}", row).renamed
    assert book.claim("row 4321", f"{4322:016x}{0:016x}", 5000).duplicate_of == 4321
    again = book.claim("row 4321", f"{7:016x}{0:016x}", 5001)
    assert (again.sample_id, again.renamed) == ("row 4321#5001", True)
    assert book.claim("row 4321", f"{7:016x}{0:016x}", 5002).duplicate_of == 5001
