"""speculators' offline data (speculators 0.9: ``train/data.py``, ``train/vocab_mapping.py``).

A Hugging Face ``save_to_disk`` dataset with ``input_ids``, ``loss_mask`` and ``seq_len``, and beside it
``hidden_states/hs_<row>.safetensors`` with ``hidden_states`` [L, n + 1, H] and ``token_ids`` int64 [L], where row
counts the dataset's rows. The last of the n + 1 states is boundary N *before* the final norm; the trainer norms it.

The dataset's Arrow files are written with pyarrow alone: a stream of record batches a part, as ``datasets`` writes
them, and two small JSON files at the end.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from storage.export.form import (
    TRAIN,
    About,
    ExportFormat,
    ExportSample,
    File,
    Part,
    Piece,
    Selection,
    Source,
    torch_bytes,
)

_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
_FEATURES = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}}
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class Speculators(ExportFormat):
    """See the module."""

    name = "speculators"
    trainer = "speculators"
    final = "final"
    boundaries = (1, 1 << 10)

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """Its ids are boundaries."""
        return list(boundaries)

    def files(self, part: Part, source: Source) -> Iterator[File]:
        """A file a sample, and the part's rows of the dataset."""
        for i, number in enumerate(part.numbers):
            yield File(
                f"{part.split}/hidden_states/hs_{part.first + i}.safetensors",
                lambda n=number: [_states(source.sample(n))],  # type: ignore[misc]
            )
        yield File(f"{part.split}/{_arrow_name(part)}", lambda: [_rows(part, source)])

    def index_files(self, split: str, parts: Sequence[Part], about: About) -> Iterator[File]:
        """What ``datasets.load_from_disk`` reads first."""
        names = [_arrow_name(part) for part in parts]
        fingerprint = hashlib.sha256(repr([part.numbers for part in parts]).encode()).hexdigest()[:16]
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        yield File(f"{split}/dataset_info.json", lambda: [_json({"features": _FEATURES})])
        yield File(f"{split}/state.json", lambda: [_json(state)])

    def vocabulary_files(
        self, counts: npt.NDArray[np.int64], d2t: torch.Tensor | None, t2d: torch.Tensor | None
    ) -> Iterator[File]:
        """``token_freq.pt``, and the maps under the names that its trainer looks for."""
        frequency = {int(token): int(counts[token]) for token in counts.nonzero()[0]}
        yield File(f"{TRAIN}/token_freq.pt", lambda: [torch_bytes(frequency)])
        if d2t is not None and t2d is not None:
            size = len(d2t)
            yield File(f"{TRAIN}/d2t-{size}.npy", lambda: [_npy(d2t)])
            yield File(f"{TRAIN}/t2d-{size}.npy", lambda: [_npy(t2d)])

    def usage(self, data: str, selection: Selection) -> str:
        """The options of its trainer."""
        ids = " ".join(map(str, selection.boundaries))
        return f"--data-path {data} --target-layer-ids {ids} --on-missing raise"


def _states(sample: ExportSample) -> Piece:
    from safetensors.torch import save  # comes with transformers; a reader of dumps doesn't need it

    states = torch.cat([sample.aux, sample.final[:, None]], dim=1).contiguous()
    data: bytes = save({"hidden_states": states, "token_ids": sample.input_ids.contiguous()})
    return data


def _rows(part: Part, source: Source) -> Piece:
    """The part's rows as an Arrow stream."""
    columns = [source.columns(number) for number in part.numbers]
    lists = [pa.array([column[k].numpy() for column in columns], pa.list_(pa.int64())) for k in (0, 1)]
    batch = pa.record_batch([*lists, pa.array(part.tokens, pa.int64())], schema=_SCHEMA)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _arrow_name(part: Part) -> str:
    return f"data-{part.number:05d}-of-{part.parts:05d}.arrow"


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=2).encode()


def _npy(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, tensor.numpy())
    return file.getvalue()
