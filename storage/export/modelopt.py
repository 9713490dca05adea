"""NVIDIA ModelOpt's offline speculative decoding data (nvidia-modelopt 0.47: ``torch/speculative/eagle/utils.py``).

``*.pt`` anywhere below a directory, loaded with ``weights_only=True``: a dict of ``input_ids`` and ``loss_mask``
(int64 [L]), ``aux_hidden_states`` ([L, nH]), ``hidden_states`` ([L, H], after the final norm), ``conversation_id``
and ``hidden_states_prenorm`` (False here; it must be the same for all files of a batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.export.form import ExportSample, Selection, TorchFileFormat, output_ids


class ModelOpt(TorchFileFormat):
    """See the module."""

    name = "modelopt"
    trainer = "NVIDIA ModelOpt"
    final = "final_normed"
    boundaries = (1, 1 << 10)

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """Id k is the output of layer k."""
        return output_ids(boundaries)

    def key(self, split: str, place: int) -> str:
        """Its producer's names are conversation ids; a number is safe whatever the id holds."""
        return f"{split}/{place:08d}.pt"

    def payload(self, sample: ExportSample) -> dict[str, Any]:
        """See the module."""
        return {
            "conversation_id": sample.sample_id,
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "aux_hidden_states": sample.flat_aux,
            "hidden_states": sample.final,
            "hidden_states_prenorm": False,
        }

    def usage(self, data: str, selection: Selection) -> str:
        """The keys of its recipe."""
        return f"data.offline_data_path={data} training.answer_only_loss=true"
