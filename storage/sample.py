"""One committed sample: its states, token ids and mask, each read when it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.dump import DumpHeader
from storage.encoded import IndexCache, read_states
from storage.errors import CorruptDump, OutputError
from storage.files import Store
from storage.float8 import dequantise
from storage.layout import POSITIONS, SCALE_TYPE, Layout, State, hidden_key, scales_key, token_key
from storage.manifest import ManifestSample
from storage.read_check import ReadCheck, RunDigests
from storage.read_memory import ReadMemory
from storage.whole_prompts import WholePrompts

TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


read_memory = ReadMemory()


def adjacent_runs(ks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits positions along K into runs that follow each other, each of which is one range of bytes.

    Returns:
        (place of the run's first position in ``ks``, that position, positions in the run) for each run.
    """
    runs: list[tuple[int, int, int]] = []
    for place, k in enumerate(ks):
        if runs and runs[-1][1] + runs[-1][2] == k:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((place, k, 1))
    return runs


def states_tensor(raw: np.ndarray[Any, np.dtype[np.uint8]], layout: Layout) -> torch.Tensor:
    """Bytes [n] of states as they were computed, as a flat tensor of the model's element type, without a copy."""
    bits = torch.from_numpy(raw.view(np.int16 if layout.itemsize == 2 else np.int32))
    return bits.view(TORCH_TYPES[layout.dtype])


@dataclass(frozen=True)
class Sample:
    """One committed sample. Nothing is read before it is asked for, and nothing is kept.

    Attributes:
        sample_id: the id in the prompt file.
        row: prepared row.
        tokens: T.
        kept: R, tokens whose states are stored: T unless the run said otherwise (`capture.keep`).
        shard: shard that holds it.
        first_slot: first inner chunk along the token axis, inside the shard.
        offset: where its bytes start in ``hidden/c/<shard>/0/0``.
        header: the dump's header.
        store: the dump's store.
        check: holds everything that is read against the manifest's hashes; None doesn't.
        indices: where the chunks are, if they are compressed.
        prompts: ids and masks of all tokens, where the states of only some are stored.
    """

    sample_id: str
    row: int
    tokens: int
    kept: int
    shard: int
    first_slot: int
    offset: int
    header: DumpHeader
    store: Store
    check: ReadCheck | None
    indices: IndexCache
    prompts: WholePrompts

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Captured boundaries, ascending; ``final`` and ``final_normed`` aren't among them."""
        return tuple(s for s in self.header.layout.states if isinstance(s, int))

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids, int64 [T], as embeddings take them."""
        return self.columns()[0]

    @property
    def loss_mask(self) -> torch.Tensor:
        """Tokens that count in a loss, bool [T]."""
        return self.columns()[1]

    @property
    def positions(self) -> torch.Tensor:
        """The tokens whose states are stored, int64 [R], ascending: row i of a state is of token positions[i]."""
        return self.columns()[2]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, int64 [T], loss mask, bool [T], and `positions`, int64 [R].

        Raises:
            CorruptDump, StorageError: they can't be read, or aren't what was committed.
        """
        positions = None
        if self.header.layout.keep.everything:
            token_ids, loss_mask = self._column("token_ids"), self._column("loss_mask")
        else:
            token_ids, loss_mask = self.prompts.of(self.row)
            positions = self._column(POSITIONS)
        if self.check is not None:
            self.check.tokens(self.shard, self._listed(self.check), token_ids, loss_mask, positions)
        places = np.arange(self.tokens) if positions is None else positions.astype(np.int64)
        return (
            torch.from_numpy(token_ids.astype(np.int64)),
            torch.from_numpy(loss_mask.astype(np.bool_)),
            torch.from_numpy(places),
        )

    def states(self, state: State) -> torch.Tensor:
        """One state by one read of just its bytes.

        Args:
            state: a boundary, ``"final"`` or ``"final_normed"``; boundary N stands for ``"final"``.

        Returns:
            [R, H] of the model's element type, a view of the bytes that were read, or made of codes and scales.

        Raises:
            KeyError: the dump doesn't hold it; the message lists what it holds.
            CorruptDump, StorageError: it can't be read, or isn't what was committed.
        """
        layout = self.header.layout
        k = layout.state_index(self.header.resolve(state))
        if layout.codec != "none" or layout.quantised:
            return self.stack([state])[:, 0]
        raw = read_memory.take(self.kept * layout.row_bytes)
        offset = layout.run_offset(self.offset, layout.slots(self.kept), k, 0)
        read = RunDigests(1, raw.size)
        self._fill(hidden_key(self.shard), offset, raw, read)
        self._check_states([k], read, None)
        return states_tensor(raw, layout).view(self.kept, layout.hidden_size)

    def stack(self, states: Sequence[State] | None = None) -> torch.Tensor:
        """Several states.

        Args:
            states: which, in which order; None for all in stored order. States that are stored side by side
                and wanted in that order are one read.

        Returns:
            [R, K, H] of the model's element type, with the strides of [K, R, H]: a view of what was read, or made of
            codes and scales where the dump holds those.

        Raises:
            KeyError: the dump doesn't hold one of them.
            CorruptDump, StorageError: it can't be read, or isn't what was committed.
        """
        layout, ks = self.header.layout, self._indices(states)
        raw, scales = self._read(ks)
        if scales is None:
            return (
                states_tensor(raw, layout)
                .view(len(ks), self._padded_rows, layout.hidden_size)[:, : self.kept]
                .transpose(0, 1)
            )
        made = read_memory.take(len(ks) * self.kept * layout.computed.row_bytes)
        out = states_tensor(made, layout.computed).view(len(ks), self.kept, layout.hidden_size)
        codes = torch.from_numpy(raw).view(len(ks), self._padded_rows, layout.hidden_size)
        for place, k in enumerate(ks):
            dequantise(codes[place, : self.kept], torch.from_numpy(scales[:, k]), out[place])
        return out.transpose(0, 1)

    def codes(self, states: Sequence[State] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Several states as they are stored in a dump of 8-bit floats; `storage.float8` has the formula.

        Args:
            states: as in `stack`.

        Returns:
            The codes' bits, uint8 [R, K, H] (``view(torch.float8_e4m3fn)`` gives their values), and the scales,
            float32 [R, K].

        Raises:
            KeyError: the dump doesn't hold one of the states.
            OutputError: the dump holds states as they were computed.
            CorruptDump, StorageError: it can't be read, or isn't what was committed.
        """
        layout, ks = self.header.layout, self._indices(states)
        raw, scales = self._read(ks)
        if scales is None:
            raise OutputError(
                f"{self.store.url} holds {layout.dtype} and no codes; read it with stack() or states()"
            )
        codes = (
            torch.from_numpy(raw)
            .view(len(ks), self._padded_rows, layout.hidden_size)[:, : self.kept]
            .transpose(0, 1)
        )
        return codes, torch.from_numpy(scales[:, ks])

    @property
    def _padded_rows(self) -> int:
        """Rows of a state as they are stored: whole inner chunks."""
        layout = self.header.layout
        return layout.slots(self.kept) * layout.chunk_rows

    def _indices(self, states: Sequence[State] | None) -> list[int]:
        """Positions along K."""
        layout = self.header.layout
        wanted = layout.states if states is None else [self.header.resolve(s) for s in states]
        return [layout.state_index(s) for s in wanted]

    def _read(self, ks: Sequence[int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Stored bytes of some states, padding rows included, and the scales [R, K] of all where there are any."""
        layout = self.header.layout
        slots = layout.slots(self.kept)
        run_bytes = slots * layout.chunk_bytes
        raw, read = read_memory.take(len(ks) * run_bytes), RunDigests(len(ks), run_bytes)
        if layout.codec != "none":
            with self._must_be_there(hidden_key(self.shard)):
                entries = self.indices.of(self.shard)[self.first_slot :][:slots, list(ks)]
                read_states(self.store, layout, self.shard, entries.swapaxes(0, 1), raw)
            if self.check is not None:
                read.update(raw.data)
        else:
            for place, first, count in adjacent_runs(ks):
                into = raw[place * run_bytes : (place + count) * run_bytes]
                self._fill(
                    hidden_key(self.shard), layout.run_offset(self.offset, slots, first, 0), into, read
                )
        scales = self._scales() if layout.quantised else None
        self._check_states(ks, read, scales)
        return raw, scales

    def _scales(self) -> npt.NDArray[np.float32]:
        layout = self.header.layout
        row_bytes = layout.num_states * layout.scale_bytes
        start = self.first_slot * layout.chunk_rows * row_bytes
        flat = self._bytes(scales_key(self.shard), start, self.kept * row_bytes)
        return flat.view(SCALE_TYPE).reshape(self.kept, layout.num_states)

    def _column(self, column: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(self.header.layout.token_columns[column]).newbyteorder("<")
        start = self.first_slot * self.header.layout.chunk_rows * dtype.itemsize
        return self._bytes(token_key(column, self.shard), start, self.kept * dtype.itemsize).view(dtype)

    def _bytes(self, key: str, offset: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw = read_memory.take(length)
        self._fill(key, offset, raw)
        return raw

    def _fill(
        self, key: str, offset: int, raw: npt.NDArray[np.uint8], read: RunDigests | None = None
    ) -> None:
        """Reads into ``raw``, hashing for the check by the way."""
        seen = read.update if read is not None and self.check is not None else None
        with self._must_be_there(key):
            self.store.read_range_into(key, offset, raw.data, seen)

    @contextlib.contextmanager
    def _must_be_there(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise CorruptDump(
                f"{self.store.where(key)} is gone, and sample {self.sample_id!r} was in it; restore it from "
                "a copy"
            ) from exc

    def _listed(self, check: ReadCheck) -> ManifestSample:
        return check.listed(self.shard, self.row, (self.tokens, self.kept, self.first_slot, self.offset))

    def _check_states(
        self, ks: Sequence[int], read: RunDigests, scales: npt.NDArray[np.float32] | None
    ) -> None:
        if self.check is not None:
            self.check.states(self.shard, self._listed(self.check), ks, read, scales)
