"""Children that end with their parent, from their first line on.

SGLang asks the kernel for that too, but only after its imports, which take seconds: a parent that dies meanwhile
would leave them behind. Asking first and looking afterwards leaves no gap.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """The kernel ends this process when the thread that spawned it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def run_detokenizer(actor_pid: int, *args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process, unless the actor that spawned it is gone already."""
    end_with_parent()
    if os.getppid() != actor_pid:
        return
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
