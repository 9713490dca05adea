"""AngelSlim's offline EAGLE-3 data (angelslim 0.5: ``dataset_builder/offline_dataset_builder.py``).

``*.ckpt`` anywhere below a directory: a dict of ``input_ids`` and ``loss_mask`` (int64 [1, L]), ``hidden_states``
([1, L, 3H], low, mid, high) and ``target_hiddens`` ([1, L, H], after the final norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.export.form import ExportSample, Selection, TorchFileFormat, output_ids


class AngelSlim(TorchFileFormat):
    """See the module."""

    name = "angelslim"
    trainer = "AngelSlim"
    final = "final_normed"
    boundaries = (3, 3)

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """Id k is the output of layer k: its own code adds one to skip the embedding."""
        return output_ids(boundaries)

    def key(self, split: str, place: int) -> str:
        """Names that sort in the order of the samples, since it sorts them."""
        return f"{split}/data_{place:08d}.ckpt"

    def payload(self, sample: ExportSample) -> dict[str, Any]:
        """See the module."""
        return {
            "input_ids": sample.input_ids[None],
            "loss_mask": sample.loss_mask[None],
            "hidden_states": sample.flat_aux[None],
            "target_hiddens": sample.final[None],
        }

    def usage(self, data: str, selection: Selection) -> str:
        """The options of its offline trainer."""
        return f"--train_hidden_path {data}"
