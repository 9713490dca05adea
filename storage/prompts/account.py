"""Sample ids, duplicates and reasons: what the preparation counts. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import xxhash

from storage.errors import PromptError
from storage.prompts.digests import DigestMap
from storage.prompts.spec import ReasonCount, RowResult

STOP_AFTER_ROWS = 256
"""Rows after which a preparation stops when the template fails most of them."""

_TEMPLATE_KINDS = frozenset({"mask", "template"})


@dataclass(frozen=True)
class Claim:
    """What became of a row's id.

    Attributes:
        sample_id: the id to use.
        duplicate_of: earlier row of the file with the same id and content, else None.
        renamed: the id was taken by other content and got ``#row``.
    """

    sample_id: str
    duplicate_of: int | None = None
    renamed: bool = False


class IdBook:
    """Ids seen so far, by digest; some 60 bytes of memory each.

    An id's digest has 64 bits, and so has a content's: two ids of a million are taken for one with a probability of
    3e-8, and then the second gets ``#row``; a row is only taken for a duplicate if both digests agree.
    """

    def __init__(self) -> None:
        self._seen = DigestMap()

    def claim(self, own_id: str | None, digest: str, source_row: int) -> Claim:
        """The id of a row: its own, else its digest; ``#row`` is put after one that other content has.

        Args:
            own_id: what the file says, if anything.
            digest: of the content, hexadecimal, 128 bits.
            source_row: in the file.
        """
        wanted = own_id if own_id is not None else digest
        content = int(digest[:16], 16)
        sample_id = wanted
        while (held := self._seen.get(_key(sample_id))) is not None:
            if held[0] == content:
                return Claim(wanted, duplicate_of=held[1])
            # A third row with this id may repeat the second one, which goes by another name.
            earlier = self._seen.get(_key(f"{wanted}\0{digest}"))
            if earlier is not None:
                return Claim(wanted, duplicate_of=earlier[1])
            sample_id = f"{sample_id}#{source_row}"
        self._seen.set(_key(sample_id), content, source_row)
        if sample_id != wanted:
            self._seen.set(_key(f"{wanted}\0{digest}"), content, source_row)
        return Claim(sample_id, renamed=sample_id != wanted)


class Tally:
    """Counts of a preparation, and the two ways in which its rows can be hopeless."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._template_failures = 0
        self._template_example = ""
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._renamed = 0
        self._renamed_example = ""
        self.source_rows = 0
        self.rows = 0
        self.to_collect = 0
        self.tokens = 0
        self.supervised_tokens = 0
        self.longest_tokens = 0

    def source(self, result: RowResult, claim: Claim) -> None:
        """One more row of the file."""
        self.source_rows += 1
        if claim.renamed:
            self._renamed += 1
            self._renamed_example = self._renamed_example or claim.sample_id
        failed = [s.rejection for s in result.samples if s.rejection and s.rejection.kind in _TEMPLATE_KINDS]
        if failed:
            self._template_failures += 1
            self._template_example = self._template_example or f"row {result.source_row}: {failed[0].reason}"

    def collect(self, tokens: int, supervised: int, at_most: int = 0) -> None:
        """One more prepared row that is to be collected; ``at_most`` tokens long with its answer."""
        self.rows += 1
        self.to_collect += 1
        self.tokens += tokens
        self.supervised_tokens += supervised
        self.longest_tokens = max(self.longest_tokens, tokens, at_most)

    def skip(self, kind: str, reason: str, source_row: int) -> None:
        """One more prepared row that is skipped."""
        self.rows += 1
        self._kinds[kind] += 1
        self._examples.setdefault(kind, f"row {source_row}: {reason}")

    def reasons(self) -> tuple[ReasonCount, ...]:
        """Skipped rows by kind, commonest first."""
        return tuple(ReasonCount(kind, n, self._examples[kind]) for kind, n in self._kinds.most_common())

    def warnings(self) -> tuple[str, ...]:
        """What a person should know although the rows are good."""
        if not self._renamed:
            return ()
        return (
            f"{self._renamed} rows of {self._url} have an id that an earlier row with other content has; "
            f"their ids got #row, such as {self._renamed_example}",
        )

    def stop_if_template_fails(self, at_end: bool) -> None:
        """Stops when the template fails most rows.

        Raises:
            PromptError: more than half of the rows, of at least `STOP_AFTER_ROWS` unless the file has ended.
        """
        if self._template_failures * 2 <= self.source_rows or not (
            at_end or self.source_rows >= STOP_AFTER_ROWS
        ):
            return
        read = "" if at_end else "first "
        raise PromptError(
            f"prompt file {self._url}: the chat template fails {self._template_failures} of the {read}"
            f"{self.source_rows} rows; {self._template_example}"
        )

    def stop_if_hopeless(self) -> None:
        """Stops at the end of a file that gives nothing.

        Raises:
            PromptError: it is empty, or every row was rejected; the commonest reasons with counts are named.
        """
        if self.source_rows == 0:
            raise PromptError(
                f"prompt file {self._url} is empty; prompts.url names a file with one row a sample"
            )
        if self.to_collect == 0:
            common = "; ".join(f"{r.count} x {r.kind} ({r.example})" for r in self.reasons()[:3])
            raise PromptError(f"prompt file {self._url}: all {self.rows} rows were rejected: {common}")


def _key(sample_id: str) -> int:
    return xxhash.xxh3_64_intdigest(sample_id.encode())
