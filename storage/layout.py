"""Where every byte of a dump is: geometry and the shard index. Pure, no I/O.

Shape legend: S shard rows, C inner chunk rows, K states, H hidden size, T a sample's tokens, R those of them whose
states are stored (= T unless `Keep` says less).

The format is zarr v3's ``sharding_indexed`` codec (zarr-specs, ZEP 2): inner chunks in any order, then an
index of two little-endian u64 (offset, length) for each inner chunk in C order over the shard's chunk grid,
both 2**64-1 where a chunk is missing, then the crc32c of the index as a little-endian u32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import google_crc32c
import numpy as np

from storage.codecs import CODECS
from storage.keep import ALL, Keep

State = int | Literal["final", "final_normed"]
"""A captured state: boundary b (the residual stream after b decoder layers), ``"final"`` (boundary N, before
the final norm) or ``"final_normed"`` (what lm_head reads)."""

MISSING = (1 << 64) - 1
STORED_AS: Mapping[str, str] = {"bfloat16": "uint16", "float16": "uint16", "float32": "uint32"}
"""Element type as the model computed it -> the unsigned integer whose bits are stored (zarr-python has no
bfloat16; one rule for all is simpler than an exception)."""
FLOAT8 = "float8_e4m3fn"
"""Element type of quantised states; `storage.float8` has the formula."""
SCALE_TYPE = np.dtype("<f4")
ENCODINGS = ("none", "float8")
"""How states are stored: as they were computed, or as 8-bit floats with a float32 scale for each token and state."""
TOKEN_COLUMNS: Mapping[str, str] = {"token_ids": "int32", "loss_mask": "uint8"}
"""Per-token arrays beside the states, each under ``tokens/`` in the same slots, with their dtypes."""
POSITIONS = "positions"
"""Further one where not every token's states are stored: int32, the token's place in its sample."""
ALL_TOKEN_COLUMNS = (*TOKEN_COLUMNS, POSITIONS)
"""Every one that a dump may have."""


@dataclass(frozen=True)
class Layout:
    """Geometry of one dump; fixed when the dump is made.

    Attributes:
        states: captured states in stored order: boundaries ascending, then final, then final_normed.
        hidden_size: H, elements per state and token.
        dtype: element type of the states as the model computed them; a key of `STORED_AS`.
        chunk_rows: C, rows of an inner chunk; a sample takes ceil(R / C) consecutive slots.
        shard_rows: S, rows of a shard; a multiple of C, at least the longest sample.
        codec: how inner chunks are compressed; one of `storage.codecs.CODECS`. Unless it is ``none``, offsets
            and lengths of chunks are in the shard's index alone.
        keep: of which tokens the states are stored.
        encoding: one of `ENCODINGS`.
    """

    states: tuple[State, ...]
    hidden_size: int
    dtype: str = "bfloat16"
    chunk_rows: int = 32
    shard_rows: int = 16_384
    codec: str = "none"
    keep: Keep = ALL
    encoding: str = "none"

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("a dump needs at least one state")
        if self.dtype not in STORED_AS:
            raise ValueError(f"states can be stored as {', '.join(STORED_AS)}, not {self.dtype}")
        if self.codec not in CODECS:
            raise ValueError(f"chunks can be stored with the codecs {', '.join(CODECS)}, not {self.codec}")
        if self.encoding not in ENCODINGS:
            raise ValueError(
                f"states can be stored with the encodings {', '.join(ENCODINGS)}, not {self.encoding}"
            )
        if self.shard_rows % self.chunk_rows or self.shard_rows <= 0:
            raise ValueError(f"shard_rows {self.shard_rows} isn't a multiple of chunk_rows {self.chunk_rows}")

    @property
    def num_states(self) -> int:
        """K."""
        return len(self.states)

    @property
    def quantised(self) -> bool:
        """Whether states are stored as 8-bit floats with scales."""
        return self.encoding != "none"

    @property
    def computed(self) -> Layout:
        """The same with states as the model computed them."""
        return replace(self, encoding="none")

    @property
    def element_type(self) -> str:
        """Type of the stored elements."""
        return FLOAT8 if self.quantised else self.dtype

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """Unsigned integer type of the same width that holds the elements' bits."""
        return np.dtype("uint8" if self.quantised else STORED_AS[self.dtype])

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one state of one token."""
        return SCALE_TYPE.itemsize if self.quantised else 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.storage_dtype.itemsize

    @property
    def token_columns(self) -> Mapping[str, str]:
        """The per-token arrays of the dump, with their dtypes."""
        return TOKEN_COLUMNS if self.keep.everything else {**TOKEN_COLUMNS, POSITIONS: "int32"}

    @property
    def row_bytes(self) -> int:
        """Bytes of one state of one token: H x itemsize."""
        return self.hidden_size * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        """K x (H x itemsize + the scale's) of a stored token: the invariant that every dump checks."""
        return self.num_states * (self.row_bytes + self.scale_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one inner chunk [C, 1, H]."""
        return self.chunk_rows * self.row_bytes

    @property
    def shard_slots(self) -> int:
        """Inner chunks along the token axis of one shard."""
        return self.shard_rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index with its checksum."""
        return self.shard_slots * self.num_states * 16 + 4

    def slots(self, rows: int) -> int:
        """Slots that a sample of ``rows`` stored tokens takes: ceil(rows / C)."""
        return -(-rows // self.chunk_rows)

    def sample_bytes(self, rows: int) -> int:
        """Bytes that a sample takes inside a shard, padding included and before any compression."""
        return self.slots(rows) * self.num_states * self.chunk_bytes

    def state_index(self, state: State) -> int:
        """Position of ``state`` along K.

        Raises:
            KeyError: the dump doesn't hold it; the message lists what it holds.
        """
        try:
            return self.states.index(state)
        except ValueError:
            held = ", ".join(str(s) for s in self.states)
            raise KeyError(f"this dump holds the states {held}; {state!r} isn't among them") from None

    def run_offset(self, sample_offset: int, slots: int, k: int, row: int) -> int:
        """Byte offset in the shard of row ``row`` (a multiple of C, or any row) of state ``k`` of a sample.

        Only where nothing is compressed.

        Args:
            sample_offset: byte offset of the sample in its shard.
            slots: slots of that sample.
            k: position of the state along K.
            row: row within the sample.
        """
        return sample_offset + k * slots * self.chunk_bytes + row * self.row_bytes

    def array_start(self, shard: int, first_slot: int) -> int:
        """Index along axis 0 of the zarr arrays where the sample at ``first_slot`` of ``shard`` starts."""
        return shard * self.shard_rows + first_slot * self.chunk_rows

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, as stored in the root group's attributes."""
        return {
            "states": list(self.states),
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
            "shard_rows": self.shard_rows,
            "codec": self.codec,
            "keep": str(self.keep),
            "encoding": self.encoding,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Inverse of `to_json`."""
        return cls(
            states=tuple(data["states"]),
            hidden_size=int(data["hidden_size"]),
            dtype=str(data["dtype"]),
            chunk_rows=int(data["chunk_rows"]),
            shard_rows=int(data["shard_rows"]),
            codec=str(data.get("codec", "none")),
            keep=Keep.parse(data.get("keep", "all")),
            encoding=str(data.get("encoding", "none")),
        )


def shard_rows_for(longest_rows: int, chunk_rows: int = 32, default: int = 16_384) -> int:
    """S for a run whose longest sample has ``longest_rows`` tokens: the default, doubled until it fits."""
    rows = default
    while rows < longest_rows:
        rows *= 2
    return -(-rows // chunk_rows) * chunk_rows


class ShardIndex:
    """The index of one shard while it is being written."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._entries = np.full((layout.shard_slots, layout.num_states, 2), MISSING, dtype="<u8")

    def add(self, first_slot: int, slots: int, offset: int) -> None:
        """Records a sample whose bytes start at ``offset``: state-major, each state's slots contiguous."""
        lay = self._layout
        entries = np.empty((slots, lay.num_states, 2), "<u8")
        starts = offset + np.arange(lay.num_states * slots, dtype="<u8") * np.uint64(lay.chunk_bytes)
        entries[:, :, 0] = starts.reshape(lay.num_states, slots).T
        entries[:, :, 1] = lay.chunk_bytes
        self.add_chunks(first_slot, entries)

    def add_chunks(self, first_slot: int, entries: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Records a sample's chunks wherever they are: [slots, K, (offset, length)]."""
        slots = len(entries)
        if not np.all(self._entries[first_slot : first_slot + slots] == MISSING):
            raise ValueError(f"slots {first_slot}..{first_slot + slots - 1} are already taken")
        self._entries[first_slot : first_slot + slots] = entries

    def entries(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The index without its checksum: little-endian u64 [slots of the shard, K, (offset, length)]."""
        return self._entries

    def to_bytes(self) -> bytes:
        """The index as it stands at the end of a shard object, crc32c included."""
        body = self._entries.tobytes()
        return body + struct.pack("<I", google_crc32c.value(body))


def hidden_key(shard: int) -> str:
    """Path of a shard's states inside the dump."""
    return f"hidden/c/{shard}/0/0"


def token_key(column: str, shard: int) -> str:
    """Path of a shard's token column inside the dump."""
    return f"tokens/{column}/c/{shard}"


def scales_key(shard: int) -> str:
    """Path of a shard's scales inside the dump."""
    return f"scales/c/{shard}/0"


def manifest_key(shard: int) -> str:
    """Path of a shard's manifest inside the dump."""
    return f"manifest/{shard}.json"


def claim_key(shard: int) -> str:
    """Path of a shard's claim inside the dump."""
    return f"claims/{shard}.json"
