"""What a run leaves behind and how it is read: prompts in, dump out. Needs neither Ray nor SGLang.

    import storage
    dump = storage.open_dump("./dump-demo")
    sample = dump[0]
    sample.states(sample.boundaries[0])   # torch.bfloat16 [T, H]

The names below are imported when they are first used, so that ``import storage`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.reader import Dump, DumpDataset, Sample, open_dump

__all__ = ["Dump", "DumpDataset", "Sample", "open_dump"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("storage.reader"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
