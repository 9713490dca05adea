"""SpecForge's offline EAGLE-3 features (specforge 0.2: ``algorithms/eagle3/data.py``, ``offline_reader.py``).

``rows_<2000k>-<2000(k+1)>/data_<i>.ckpt`` below a directory: a dict of ``input_ids`` and ``loss_mask`` (int64 [L]),
``aux_hidden_state`` ([1, L, 3H], low, mid, high) and ``hidden_state`` ([1, L, H], after the final norm). Its reader
shifts by itself and swaps the names: what it trains on as ``hidden_state`` is ``aux_hidden_state``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.export.form import ExportSample, File, Selection, TorchFileFormat, output_ids, torch_bytes

ROWS_A_FOLDER = 2000


class SpecForge(TorchFileFormat):
    """See the module."""

    name = "specforge"
    trainer = "SpecForge"
    final = "final_normed"
    boundaries = (3, 3)

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """Id k is the output of layer k."""
        return output_ids(boundaries)

    def key(self, split: str, place: int) -> str:
        """The producer's own names, which keep a folder at 2,000 files."""
        start = place // ROWS_A_FOLDER * ROWS_A_FOLDER
        return f"{split}/rows_{start}-{start + ROWS_A_FOLDER}/data_{place}.ckpt"

    def payload(self, sample: ExportSample) -> dict[str, Any]:
        """See the module."""
        return {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "aux_hidden_state": sample.flat_aux[None],
            "hidden_state": sample.final[None],
        }

    def vocabulary_files(
        self, counts: npt.NDArray[np.int64], d2t: torch.Tensor | None, t2d: torch.Tensor | None
    ) -> Iterator[File]:
        """``vocab_mapping/vocab_mapping.pt`` with both maps."""
        if d2t is not None and t2d is not None:
            data = torch_bytes({"d2t": d2t, "t2d": t2d})
            yield File("vocab_mapping/vocab_mapping.pt", lambda: [data])

    def usage(self, data: str, selection: Selection) -> str:
        """The key of its run file."""
        return f"data.hidden_states_path: {data}"
