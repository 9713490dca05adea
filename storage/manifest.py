"""What is committed: one manifest a shard, put after the shard's data. Readers trust nothing else.

A sample can be in two shards when its writer was given up and finished after all. Then the copy in the shard
with the lowest number counts, for every reader and for every count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import Layout, manifest_key

MANIFEST_VERSION = 1
READ_THREADS = 16


@dataclass(frozen=True)
class ManifestSample:
    """One committed sample.

    Attributes:
        row: prepared row.
        sample_id: the prompt file's id; any text.
        first_slot: first inner chunk along the token axis, counted inside the shard.
        tokens: T.
        kept: R, tokens whose states are stored: rows of each state.
        offset: where its bytes start in the shard's states; state-major, each state [slots * C, H], unless
            they are compressed.
        xxh3: for each state in stored order, xxh3-64 (16 hex digits, seed 0) of its rows, padding included and
            before any compression, followed by their scales (float32 [R]) where they are quantised.
        tokens_xxh3: xxh3-64 of its token_ids (int32 [T]) followed by its loss_mask (uint8 [T]) and, where not every
            token's states are stored, their positions (int32 [R]).
    """

    row: int
    sample_id: str
    first_slot: int
    tokens: int
    kept: int
    offset: int
    xxh3: tuple[str, ...]
    tokens_xxh3: str


@dataclass(frozen=True)
class ManifestObject:
    """One object of a shard.

    Attributes:
        key: its path inside the dump.
        bytes: its size.
        xxh3: xxh3-64 of its bytes; for the states see `hidden_digest`.
    """

    key: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What one shard commits.

    Attributes:
        shard: its number.
        run_id: the run whose writer sealed it.
        writer: that writer's name.
        layout: geometry that it was written with; equals the dump's.
        samples: in the order of their slots.
        objects: states first, then scales where there are any, then each token column.
    """

    shard: int
    run_id: str
    writer: str
    layout: Layout
    samples: tuple[ManifestSample, ...]
    objects: tuple[ManifestObject, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, as stored."""
        return {
            "manifest_version": MANIFEST_VERSION,
            "shard": self.shard,
            "run_id": self.run_id,
            "writer": self.writer,
            "layout": self.layout.to_json(),
            "objects": [asdict(o) for o in self.objects],
            "samples": [_sample_json(s, self.layout) for s in self.samples],
        }

    def to_bytes(self) -> bytes:
        """The manifest's object."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it isn't a manifest of this version.
        """
        if data["manifest_version"] != MANIFEST_VERSION:
            raise ValueError(f"manifest version {data['manifest_version']}, this is {MANIFEST_VERSION}")
        return cls(
            shard=int(data["shard"]),
            run_id=str(data["run_id"]),
            writer=str(data["writer"]),
            layout=Layout.from_json(data["layout"]),
            samples=tuple(
                ManifestSample(**{"kept": s["tokens"], **s, "xxh3": tuple(s["xxh3"])})
                for s in data["samples"]
            ),
            objects=tuple(ManifestObject(**o) for o in data["objects"]),
        )


def _sample_json(sample: ManifestSample, layout: Layout) -> dict[str, Any]:
    """Without ``kept`` where it is ``tokens`` anyhow: so has every dump of version 1."""
    data = asdict(sample)
    if layout.keep.everything:
        del data["kept"]
    return data


def tokens_digest(
    token_ids: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.int32] | None = None,
) -> str:
    """xxh3-64 (hex) of a sample's token_ids, its loss_mask, and ``positions`` where not all tokens are stored."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    if positions is not None:
        digest.update(np.ascontiguousarray(positions, dtype="<i4").tobytes())
    return digest.hexdigest()


def hidden_digest(samples: Iterable[ManifestSample], index: bytes) -> str:
    """xxh3-64 (hex) that stands for a whole object of states, made without reading it again.

    It is taken over the samples' per-state digests (8 bytes each, big-endian as xxHash's canonical form has
    them) in the order of their bytes in the object, followed by the object's index with its checksum. Every
    byte that a reader can reach is under it; bytes of samples that were given up are reached by nobody.
    """
    digest = xxhash.xxh3_64()
    for sample in samples:
        digest.update(bytes.fromhex("".join(sample.xxh3)))
    digest.update(index)
    return digest.hexdigest()


@dataclass(frozen=True)
class Committed:
    """A committed sample and the shard that holds it."""

    shard: int
    sample: ManifestSample


def read_manifest(store: Store, shard: int) -> Manifest:
    """The manifest of one shard.

    Raises:
        FileNotFoundError: the shard isn't committed.
        CorruptDump: what is there isn't a manifest of that shard.
    """
    return parse_manifest(store.read(manifest_key(shard)), store, shard)


def parse_manifest(data: bytes, store: Store, shard: int) -> Manifest:
    """The manifest of one shard, from its bytes in ``store``.

    Raises:
        CorruptDump: they aren't a manifest of that shard.
    """
    key = manifest_key(shard)
    try:
        manifest = Manifest.from_json(json.loads(data))
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDump(
            f"{store.where(key)} isn't a readable manifest ({exc}). Restore it from a copy, or remove it and "
            "run the same command again: the shard's samples are then collected anew"
        ) from exc
    if manifest.shard != shard:
        raise CorruptDump(
            f"{store.where(key)} says that it is of shard {manifest.shard}; restore it from a copy"
        )
    return manifest


def committed_shards(store: Store) -> list[int]:
    """Numbers of the shards that have a manifest, ascending."""
    names = (PurePosixPath(key) for key, _ in store.list("manifest"))
    return sorted(int(name.stem) for name in names if name.suffix == ".json" and name.stem.isdecimal())


def read_manifests(store: Store, known: Collection[int] = ()) -> list[Manifest]:
    """All manifests in the order of their shards, except those of the shards in ``known``; read in parallel.

    Raises:
        CorruptDump: one of them isn't readable.
        StorageError: the dump can't be read.
    """
    shards = [shard for shard in committed_shards(store) if shard not in known]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda shard: read_manifest(store, shard), shards))


def committed_samples(manifests: Iterable[Manifest]) -> dict[int, Committed]:
    """Prepared row -> the copy of it that counts, in the order of the rows."""
    found: dict[int, Committed] = {}
    for manifest in sorted(manifests, key=lambda m: m.shard, reverse=True):
        found.update((s.row, Committed(manifest.shard, s)) for s in manifest.samples)
    return dict(sorted(found.items()))
