"""DeepSpec's target cache, version 2 (deepseek-ai/DeepSpec: ``deepspec/data/target_cache_dataset.py``).

``manifest.json``, ``samples.idx`` (56 bytes a sample, `INDEX_RECORD`) and ``shard-<k>.bin``. In a shard, after each
other for each sample: ``input_ids`` int32 [L], ``attention_mask`` and ``loss_mask`` uint8 [L],
``target_hidden_states`` bfloat16 [L, nH], ``target_last_hidden_states`` bfloat16 [L, H], after the final norm.
Where everything lies follows from the lengths, so the index needs no look at the shards.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from storage.export.form import About, ExportFormat, File, Part, Piece, Selection, Source, output_ids
from storage.layout import Layout

VERSION = 2
INDEX_RECORD = struct.Struct("<QIIQQQQQ")
"""Sample, shard, length, then the offsets of the five tensors."""
HIDDEN_BYTES = 2


def tensor_bytes(tokens: int, num_aux: int, hidden_size: int) -> tuple[int, ...]:
    """Bytes of a sample's five tensors, in their order."""
    state = tokens * hidden_size * HIDDEN_BYTES
    return 4 * tokens, tokens, tokens, num_aux * state, state


class DeepSpec(ExportFormat):
    """See the module."""

    name = "deepspec"
    trainer = "DeepSpec"
    final = "final_normed"
    boundaries = (1, 1 << 10)
    file_a_sample = False
    part_bytes = 1 << 30

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """Id k is the output of layer k, -1 the embeddings."""
        return output_ids(boundaries)

    def check_layout(self, layout: Layout) -> str | None:
        """It knows bfloat16 and two kinds of float8."""
        if layout.dtype == "bfloat16":
            return None
        return f"DeepSpec's cache holds bfloat16, and the dump {layout.dtype}"

    def files(self, part: Part, source: Source) -> Iterator[File]:
        """One shard."""
        yield File(_shard_key(part), lambda: self._pieces(part, source))

    def _pieces(self, part: Part, source: Source) -> Iterator[Piece]:
        for number in part.numbers:
            sample = source.sample(number)
            yield _raw(sample.input_ids.to(torch.int32))
            yield np.ones(len(sample.input_ids), np.uint8)
            yield _raw(sample.loss_mask.to(torch.uint8))
            yield _raw(sample.flat_aux)
            yield _raw(sample.final)

    def index_files(self, split: str, parts: Sequence[Part], about: About) -> Iterator[File]:
        """``samples.idx``, then ``manifest.json``, by which the cache is complete."""
        num_aux, hidden_size = len(about.selection.boundaries), about.layout.hidden_size
        index = b"".join(_records(part, num_aux, hidden_size) for part in parts)
        manifest = {
            "version": VERSION,
            "num_samples": sum(len(part.numbers) for part in parts),
            "num_shards": len(parts),
            "target_layer_ids": self.layer_ids(about.selection.boundaries),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": INDEX_RECORD.size,
            "hidden_size": hidden_size,
            "shards": [
                {"shard_id": part.number, "file_name": _shard_key(part).split("/")[-1]} for part in parts
            ],
            "target_model_name_or_path": about.model,
        }
        yield File(f"{split}/samples.idx", lambda: [index])
        yield File(
            f"{split}/manifest.json", lambda: [json.dumps(manifest, indent=2, sort_keys=True).encode()]
        )

    def usage(self, data: str, selection: Selection) -> str:
        """The keys of its configuration."""
        return f"data.target_cache_path={data} model.target_layer_ids={output_ids(selection.boundaries)}"


def _shard_key(part: Part) -> str:
    return f"{part.split}/shard-{part.number:05d}.bin"


def _records(part: Part, num_aux: int, hidden_size: int) -> bytes:
    records, at = [], 0
    for i, tokens in enumerate(part.tokens):
        sizes = tensor_bytes(tokens, num_aux, hidden_size)
        *offsets, end = accumulate(sizes, initial=at)
        records.append(INDEX_RECORD.pack(part.first + i, part.number, tokens, *offsets))
        at = end
    return b"".join(records)


def _raw(tensor: torch.Tensor) -> Piece:
    """A tensor's bytes in C order, uint8 [n]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
