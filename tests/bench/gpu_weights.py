"""SGLang's scheduler processes with random weights as a fresh model has them.

SGLang's own dummy weights are so small that every layer leaves its input as it is; the proof at the start of an
hsdump engine then can't tell one layer from the next, and rightly refuses. Module-level functions: spawn pickles them
by name.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench")]

STANDARD_DEVIATION = 0.02


def run_with_hook(hook: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler process of an hsdump engine."""
    from actors.capture.hook import run_scheduler_with_hook

    use_random_weights()
    run_scheduler_with_hook(hook, *args, **kwargs)


def run_stock(*args: Any, **kwargs: Any) -> None:
    """SGLang's own scheduler process, untouched but for the weights."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    use_random_weights()
    run_scheduler_process(*args, **kwargs)


def use_random_weights() -> None:
    """Replaces what fills a model under ``load_format: dummy``, in this process."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = fill


def fill(model: Any, *args: Any, **kwargs: Any) -> None:
    """Normal matrices, norms of one, biases of zero; by a parameter's name, so the same on every rank."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        if tensor.dim() < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
