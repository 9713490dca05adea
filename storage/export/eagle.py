"""The first EAGLE's training data (SafeAILab/EAGLE, ``ge_data``): every file below a directory is loaded.

A dict of ``input_ids`` and ``loss_mask`` (int64 [L]) and ``hidden_state`` (float16 [L, H], after the final norm). It
has no auxiliary states. Because all files are loaded, nothing else may lie in the split's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from storage.errors import BadStates
from storage.export.form import ExportSample, Selection, TorchFileFormat


class Eagle(TorchFileFormat):
    """See the module."""

    name = "eagle"
    trainer = "EAGLE"
    final = "final_normed"
    boundaries = (0, 0)

    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """It reads none."""
        return []

    def key(self, split: str, place: int) -> str:
        """The producer's own names."""
        return f"{split}/data_{place}.ckpt"

    def payload(self, sample: ExportSample) -> dict[str, Any]:
        """See the module.

        Raises:
            BadStates: a value is beyond float16, which the trainer wants.
        """
        hidden_state = sample.final.to(torch.float16)
        if not bool(torch.isfinite(hidden_state).all()):
            largest = float(sample.final.float().abs().max())
            raise BadStates(
                f"sample {sample.sample_id!r}: final_normed reaches {largest:g} and EAGLE's files are float16, which "
                "ends at 65504; use a trainer that reads bfloat16 (specforge, speculators)"
            )
        return {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_state": hidden_state,
        }

    def usage(self, data: str, selection: Selection) -> str:
        """The option of its trainer."""
        return f"--tmpdir {data}"
