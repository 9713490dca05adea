"""SGLang's engine with the hook's function in place of its scheduler function, and its processes' life."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from actors.capture import adapter
from actors.capture.hook import HookSpec
from actors.capture.lifeline import run_detokenizer
from actors.messages import EngineSpec
from storage.errors import ResourceError

logger = logging.getLogger(__name__)

SchedulerFunction = Callable[..., None]


class EngineProcess:
    """A started SGLang engine; construct it in the thread that lives as long as it should.

    SGLang's children ask the kernel to end them with the *thread* that spawned them.

    Args:
        arguments: SGLang's server arguments.
        function: module-level function that every scheduler process runs; its first argument is ``hook``.
        hook: what it has to know.
    """

    def __init__(self, arguments: Mapping[str, Any], function: SchedulerFunction, hook: HookSpec) -> None:
        self._others = descendants()
        with _own_logging():
            from sglang.srt.entrypoints.engine import Engine

            functions = {
                "run_scheduler_process_func": staticmethod(functools.partial(function, hook)),
                "run_detokenizer_process_func": staticmethod(functools.partial(run_detokenizer, os.getpid())),
            }
            self.engine: Any = type("CaptureEngine", (Engine,), functions)(**arguments)
        # Its own exit handler would end every child of this process, other people's too.
        atexit.unregister(self.engine.shutdown)
        self._children = [p for p in multiprocessing.active_children() if p.pid not in self._others]

    @property
    def replica_argument(self) -> str:
        """The request argument that names a data-parallel replica."""
        return adapter.replica_argument(self.engine.async_generate)

    @property
    def max_sample_tokens(self) -> int:
        """Longest prompt: SGLang refuses prompts of max_req_input_len tokens or more."""
        return int(self.engine.tokenizer_manager.max_req_input_len) - 1

    async def prefill(
        self, token_ids: list[int], rid: str, new_tokens: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Runs one request; greedy, so that it can be repeated.

        Returns:
            SGLang's answer, with ``output_ids`` and ``meta_info``.
        """
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        return await self.generate(token_ids, rid, sampling, **more)

    async def generate(
        self, token_ids: list[int], rid: str, sampling: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        """Runs one request with SGLang's sampling parameters; answers as `prefill`."""
        answer: dict[str, Any] = await self.engine.async_generate(
            input_ids=token_ids, sampling_params=dict(sampling), rid=rid, **more
        )
        return answer

    @property
    def heard_ms(self) -> int:
        """When the scheduler processes were last heard of: it moves while a long answer is decoded."""
        return int(1000 * getattr(self.engine.tokenizer_manager, "last_receive_tstamp", 0.0))

    def abort_all(self) -> None:
        """Gives up every request."""
        self.engine.tokenizer_manager.abort_request(abort_all=True)

    def dead_child(self) -> str | None:
        """Which of the processes that this one started is gone, if one is."""
        for child in self._children:
            if not child.is_alive():
                return f"{child.name} (pid {child.pid}) ended with exit code {child.exitcode}"
        return None

    def end(self) -> None:
        """Ends the engine's processes and nobody else's."""
        watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        end_processes(self._others)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Keeps the root logger as it is while SGLang starts, which replaces its handlers by one on standard error.

    SGLang's warnings go where this process's log goes; it would log as much here as in its children's files.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    theirs = logging.getLogger("sglang")
    theirs.setLevel(logging.WARNING)
    theirs.handlers[:], theirs.propagate = handlers or [logging.NullHandler()], False
    try:
        yield
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
        theirs.handlers.clear()
        theirs.propagate = True


def open_sockets() -> list[Any]:
    """Every ZeroMQ socket of this process that isn't closed."""
    import zmq

    # By type, since isinstance asks proxies what they stand for.
    sockets = [thing for thing in gc.get_objects() if issubclass(type(thing), zmq.Socket)]
    return [s for s in sockets if not s.closed and not getattr(s, "_shadow", False)]


def close_sockets(others: Collection[Any]) -> None:
    """Closes SGLang's sockets, which it never does; call it in the thread whose loop they belong to.

    The garbage collector may meet a dead engine's context before its sockets, and would then wait for ever for
    somebody to close them.
    """
    import zmq

    for socket in open_sockets():
        if socket not in others:
            with contextlib.suppress(zmq.ZMQError):
                socket.close(linger=0)


def end_processes(others: frozenset[int], patience_s: float = 30.0) -> None:
    """Ends every descendant of this process that isn't among ``others``, and waits until they are gone."""
    import psutil

    mine = [p for p in psutil.Process().children(recursive=True) if p.pid not in others | {_tracker_pid()}]
    for process in mine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(mine, timeout=patience_s)


def descendants() -> frozenset[int]:
    """Process ids of this process's descendants."""
    import psutil

    return frozenset(p.pid for p in psutil.Process().children(recursive=True))


def _tracker_pid() -> int:
    """The helper process of multiprocessing, which serves this process whatever becomes of the engine."""
    from multiprocessing import resource_tracker

    return int(getattr(resource_tracker._resource_tracker, "_pid", None) or 0)


def prepare_process() -> None:
    """Makes a dying engine leave this process alive and no core file behind.

    SGLang's processes send SIGQUIT to their parent when they fail; its default ends this one before it can
    say why. Python sets signal handlers in the main thread only, the C library in any.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGQUIT, ctypes.c_void_p(int(signal.SIG_IGN)))


def gpus_visible() -> int:
    """GPUs that this process may use, asked without a CUDA context."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([x for x in listed.split(",") if x.strip()])
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(answer.stdout.splitlines())


def check_gpus(spec: EngineSpec) -> None:
    """Counts GPUs before anything is loaded.

    Raises:
        ResourceError: fewer than the engine needs.
    """
    visible = gpus_visible() if spec.gpus else 0
    if visible < spec.gpus:
        raise ResourceError(
            f"{spec.name} needs {spec.gpus} GPUs and sees {visible}; lower engine.gpus, or set it to 0 for "
            "the CPU"
        )
