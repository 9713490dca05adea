"""Ids of prompt rows: unique, stable, and honest about repeats."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from storage.prompts.account import Claim, IdBook


def digest(content: str) -> str:
    return xxhash.xxh3_128_hexdigest(content.encode())


def test_ids_repeat_as_documented() -> None:
    book = IdBook()
    a, b = digest("a"), digest("b")
    assert book.claim("x", a, 0) == Claim("x")
    assert book.claim("x", a, 1) == Claim("x", duplicate_of=0)
    assert book.claim("x", b, 2) == Claim("x#2", renamed=True)
    assert book.claim("x", b, 3) == Claim("x", duplicate_of=2)
    assert book.claim("y", a, 4) == Claim("y")
    assert book.claim(None, a, 5) == Claim(a)
    assert book.claim(None, a, 6) == Claim(a, duplicate_of=5)


def test_a_name_given_to_a_repeated_id_may_be_taken_too() -> None:
    book = IdBook()
    book.claim("x#2", digest("a"), 0)
    book.claim("x", digest("b"), 1)
    assert book.claim("x", digest("c"), 2) == Claim("x#2#2", renamed=True)


@given(
    st.lists(st.tuples(st.sampled_from([None, "x", "x#1", "x#2", "y"]), st.sampled_from("abc")), max_size=20)
)
def test_kept_ids_are_unique_and_each_pair_is_kept_once(rows: list[tuple[str | None, str]]) -> None:
    book = IdBook()
    first: dict[tuple[str, str], int] = {}
    kept: list[str] = []
    for number, (own_id, content) in enumerate(rows):
        claim = book.claim(own_id, digest(content), number)
        pair = (own_id or digest(content), content)
        # "x#2" may be an earlier row's own id, with this content; then this is that row's repeat.
        if claim.duplicate_of is None:
            assert pair not in first
            kept.append(claim.sample_id)
            first[pair] = number
        elif pair in first:
            assert claim.duplicate_of == first[pair]
        else:
            assert rows[claim.duplicate_of][1] == content
    assert len(kept) == len(set(kept))
