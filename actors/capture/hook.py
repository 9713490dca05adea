"""What runs in every scheduler process: it puts the hook round the loaded model, and then it is SGLang's.

The inner model's forward gives ``(hidden_states, collected)`` while its collector is on. The hook keeps what
was collected and returns ``hidden_states`` alone: the CausalLM wrapper gets exactly what it would have had.
Only rank 0 of each data-parallel replica copies; the other ranks run the collector, which may take part in
collectives.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.capture import wire
from actors.capture.captured import CapturedModel
from actors.capture.cpu import register_mla_handler
from actors.capture.leftovers import move_load_snapshot, unname_progress_lock
from actors.capture.lifeline import end_with_parent
from actors.messages import CaptureSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookSpec:
    """What a scheduler process has to know; spawn pickles it.

    Attributes:
        address: the actor's listener.
        token: shows the actor that the peer is its own child.
        capture: what to capture.
        log_stem: path of the log files without rank and suffix.
        vocab_size: V, without padding.
        cpu: the engine runs on the CPU.
    """

    address: str
    token: str
    capture: CaptureSpec
    log_stem: str
    vocab_size: int
    cpu: bool


def run_scheduler_with_hook(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with the hook in it; module-level, since spawn pickles it by name."""
    # Before it connects: an actor that is gone by then doesn't answer, one that ends later takes this along.
    end_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    given = inspect.signature(run_scheduler_process).bind(*args, **kwargs).arguments
    ranks = {"tp_rank": int(given.get("tp_rank") or 0), "dp_rank": int(given.get("dp_rank") or 0)}
    _log_to(f"{spec.log_stem}-dp{ranks['dp_rank']}-tp{ranks['tp_rank']}.log")
    channel = wire.connect(spec.address, spec.token, {"pid": os.getpid(), **ranks})
    try:
        if spec.cpu:
            register_mla_handler()
        unname_progress_lock()
        move_load_snapshot(Path(spec.log_stem).parent)
        install(spec, channel, ranks)
    except Exception as error:
        report_failure(channel, error)
        raise
    run_scheduler_process(*args, **kwargs)


def install(spec: HookSpec, channel: wire.Channel, ranks: dict[str, int]) -> None:
    """Makes `ModelRunner.load_model` put the hook round what it loaded."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load_model = ModelRunner.load_model

    def load_and_hook(runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = load_model(runner, *args, **kwargs)
        except Exception as error:
            report_failure(channel, error, loading=True)
            raise
        try:
            CapturedModel(spec.capture, spec.vocab_size, channel, runner.model, str(runner.device), ranks)
        except Exception as error:
            report_failure(channel, error)
            raise
        return result

    ModelRunner.load_model = load_and_hook


def report_failure(channel: wire.Channel, error: Exception, loading: bool = False) -> None:
    """Tells the actor why this process is about to end, with the error's class by name."""
    name = type(error).__name__
    if loading:
        name = "ResourceError" if isinstance(error, torch.OutOfMemoryError) else "ModelError"
    text = f"{type(error).__name__}: {error}" if loading else str(error)
    try:
        channel.send({"failed": {"error": name, "message": text}})
    except wire.ChannelClosed:
        logger.exception("the engine's actor is gone before it could be told why")


def _log_to(path: str) -> None:
    """Sends this process's standard output and error, native code's included, to a file of its own."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
