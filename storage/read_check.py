"""Holds what a reader got against the manifests' hashes.

A hash costs a few per cent of a read, and a trainer that goes on with another shard's bytes costs a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import POSITIONS, Layout, hidden_key, manifest_key, token_key
from storage.manifest import ManifestSample, read_manifest, tokens_digest

KEEP_SHARDS = 256
"""Shards whose manifests are remembered."""
_SHOWN = "restore it from a copy; `hsdump verify` names all samples that are affected"


class RunDigests:
    """Hashes of runs of equal length whose bytes come one after another. Pure.

    Args:
        runs: how many.
        run_bytes: length of each.
    """

    def __init__(self, runs: int, run_bytes: int) -> None:
        self.digests = [xxhash.xxh3_64() for _ in range(runs)]
        self.run_bytes = run_bytes
        self._done = 0

    def update(self, piece: memoryview) -> None:
        """Takes the next bytes, which may be of several runs."""
        while piece:
            run, done = divmod(self._done, self.run_bytes)
            part = piece[: self.run_bytes - done]
            self.digests[run].update(part)
            self._done += len(part)
            piece = piece[len(part) :]


class ReadCheck:
    """The hashes of a dump's samples, read shard by shard when they are wanted. Picklable, safe under threads.

    Args:
        store: the dump.
        layout: its geometry.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store, self._layout = store, layout
        self._shards: OrderedDict[int, Mapping[int, ManifestSample]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": OrderedDict()}

    def listed(self, shard: int, row: int, place: tuple[int, int, int, int]) -> ManifestSample:
        """What the manifest says of a sample.

        Args:
            shard: where it is.
            row: prepared row.
            place: its tokens, stored tokens, first slot and offset as the reader knows them.

        Raises:
            CorruptDump: the manifest is gone, damaged or says something else.
        """
        key = manifest_key(shard)
        found = self._samples(shard).get(row)
        if found is None or (found.tokens, found.kept, found.first_slot, found.offset) != place:
            raise CorruptDump(
                f"{self._store.where(key)} doesn't have row {row} with (tokens, kept, first_slot, offset) = {place}; "
                + _SHOWN
            )
        return found

    def states(
        self,
        shard: int,
        listed: ManifestSample,
        ks: Sequence[int],
        read: RunDigests,
        scales: npt.NDArray[np.float32] | None,
    ) -> None:
        """Checks states.

        Args:
            shard: where they are.
            listed: the sample.
            ks: their positions along K.
            read: their bytes, with the padding rows or without them.
            scales: float32 [R, K], of all states, where they are quantised.

        Raises:
            CorruptDump: a state isn't what was committed.
        """
        whole = self._layout.slots(listed.kept) * self._layout.chunk_bytes
        for k, digest in zip(ks, read.digests, strict=True):
            digest.update(bytes(whole - read.run_bytes))
            if scales is not None:
                digest.update(np.ascontiguousarray(scales[:, k]).tobytes())
            if digest.hexdigest() != listed.xxh3[k]:
                self._wrong(hidden_key(shard), f"state {self._layout.states[k]}", listed)

    def tokens(
        self,
        shard: int,
        listed: ManifestSample,
        token_ids: npt.NDArray[Any],
        loss_mask: npt.NDArray[Any],
        positions: npt.NDArray[Any] | None,
    ) -> None:
        """Checks token ids (int32 [T]), mask (uint8 [T]) and, where not all are stored, positions (int32 [R]).

        Raises:
            CorruptDump: they aren't what was committed.
        """
        if tokens_digest(token_ids, loss_mask, positions) == listed.tokens_xxh3:
            return
        if positions is None:
            keys = f"{token_key('token_ids', shard)} or {token_key('loss_mask', shard)}"
            self._wrong(keys, "token_ids or loss_mask", listed)
        self._wrong(f"{token_key(POSITIONS, shard)} or prompts/", "token_ids, loss_mask or positions", listed)

    def _wrong(self, key: str, what: str, listed: ManifestSample) -> NoReturn:
        raise CorruptDump(
            f"{self._store.where(key)}: {what} of sample {listed.sample_id!r} (row {listed.row}) isn't what was "
            f"committed, its xxh3 differs from the manifest's; {_SHOWN}"
        )

    def _samples(self, shard: int) -> Mapping[int, ManifestSample]:
        found = self._shards.get(shard)
        if found is None:
            try:
                manifest = read_manifest(self._store, shard)
            except FileNotFoundError as exc:
                where = self._store.where(manifest_key(shard))
                raise CorruptDump(
                    f"{where} is gone, and samples.parquet still names its shard; {_SHOWN}"
                ) from exc
            found = {sample.row: sample for sample in manifest.samples}
            self._shards[shard] = found
            while len(self._shards) > KEEP_SHARDS:
                self._shards.popitem(last=False)
        return found
