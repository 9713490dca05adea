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
    from storage.dataset import DumpDataset
    from storage.reader import Dump, open_dump
    from storage.sample import Sample
    from storage.stream import DumpStream

__all__ = ["Dump", "DumpDataset", "DumpStream", "Sample", "open_dump"]
_HOME = {
    "Dump": "storage.reader",
    "DumpDataset": "storage.dataset",
    "DumpStream": "storage.stream",
    "Sample": "storage.sample",
    "open_dump": "storage.reader",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
