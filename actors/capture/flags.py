"""SGLang's server arguments: those that capture decides, those that it refuses, and the user's own.

The tables are data, so that a plan can check a run file where SGLang isn't installed. Names of fields that
only some releases have are dropped by looking at `ServerArgs` itself.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.capture.adapter import installed_fields as installed_fields
from actors.capture.ring import aligned
from actors.messages import EngineSpec
from storage.errors import CaptureRefused, ConfigError

GPU_CHUNK_TOKENS = 8192
CPU_CHUNK_TOKENS = 2048
"""Default chunked_prefill_size: the most tokens of one forward, which the ring's size follows from."""
RING_FORWARDS = 2
"""The ring holds at least this many forwards, so that one can be copied in while another is drained."""
AUTO_RING_FORWARDS = 4
GPU_FORWARDS = 3
"""Forwards whose states are on the GPU at most: one is computed, and `Tap` keeps two on their way to the host."""

DECIDED: Mapping[str, str] = {
    "model_path": "set model.path",
    "model": "set model.path",
    "revision": "set model.revision",
    "trust_remote_code": "set model.trust_remote_code",
    "dtype": "set model.dtype",
    "device": "follows from engine.gpus",
    "tp_size": "follows from engine.gpus and engine.data_parallel",
    "tensor_parallel_size": "follows from engine.gpus and engine.data_parallel",
    "dp_size": "set engine.data_parallel",
    "data_parallel_size": "set engine.data_parallel",
    "skip_tokenizer_init": "samples are tokenised before they reach the engine",
    "tokenizer_path": "samples are tokenised before they reach the engine",
    "tokenizer_mode": "samples are tokenised before they reach the engine",
    "tokenizer_worker_num": "requests go through one tokenizer manager",
    "detokenizer_worker_num": "requests go through one tokenizer manager",
    "is_embedding": "capture prefills a causal language model",
    "custom_sigquit_handler": "the engine's actor watches its processes itself",
    "log_requests": "each request holds a whole prompt",
    "host": "the engine opens no port for requests",
    "port": "the engine opens no port for requests",
}
"""Arguments that something else in the run file decides, with where to say it."""

REFUSED: Mapping[str, str] = {
    "enable_mixed_chunk": "mixes decode rows into captured forwards",
    "pp_size": "a pipeline stage lacks layers",
    "pipeline_parallel_size": "a pipeline stage lacks layers",
    "nnodes": "the ring is shared memory of one node; see engine.nodes",
    "node_rank": "the ring is shared memory of one node; see engine.nodes",
    "dist_init_addr": "the ring is shared memory of one node; see engine.nodes",
    "enable_dp_attention": "rows are spread over ranks in a way that isn't tested",
    "attn_dp_size": "rows are spread over ranks in a way that isn't tested",
    "dwdp_size": "rows are spread over ranks in a way that isn't tested",
    "attn_cp_size": "context parallel ranks hold parts of a sample",
    "dcp_size": "context parallel ranks hold parts of a sample",
    "enable_prefill_cp": "context parallel ranks hold parts of a sample",
    "enable_nsa_prefill_context_parallel": "context parallel ranks hold parts of a sample",
    "enable_prefill_context_parallel": "context parallel ranks hold parts of a sample",
    "enable_two_batch_overlap": "layers run past the collector",
    "enable_single_batch_overlap": "layers run past the collector",
    "enable_pdmux": "split prefill runs past the hook",
    "disaggregation_mode": "prefill and decode are separate engines",
    "encoder_only": "the language model isn't there",
    "use_ray": "its schedulers are Ray actors, started without the hook",
    "enable_return_hidden_states": "changes what the model's forward returns",
    "return_hidden_states_mode": "changes what the model's forward returns",
    "enable_return_aux_hidden_states": "changes what the model's forward returns",
    "aux_hidden_state_capture": "changes what the model's forward returns",
    "return_aux_hidden_state_layer_ids": "changes what the model's forward returns",
    "enable_torch_compile": "compiled code runs past Python hooks",
    "enable_piecewise_cuda_graph": "CUDA graphs of a prefill run past Python hooks",
    "cuda_graph_config": "CUDA graphs of a prefill run past Python hooks",
    "cuda_graph_backend_prefill": "CUDA graphs of a prefill run past Python hooks",
    "cuda_graph_bs_prefill": "CUDA graphs of a prefill run past Python hooks",
    "cuda_graph_max_bs_prefill": "CUDA graphs of a prefill run past Python hooks",
    "enable_nvidia_megakernel": "one kernel replaces the layers",
    "enable_amd_monokernel": "one kernel replaces the layers",
    "allow_auto_truncate": "cuts samples without a word",
    "enable_hierarchical_cache": "a reused prefix has no states",
    "enable_hisparse": "a reused prefix has no states",
    "enable_lmcache": "a reused prefix has no states",
    "enable_flexkv": "a reused prefix has no states",
    "enable_unified_cache_external_linker": "a reused prefix has no states",
    "enable_session_radix_cache": "a reused prefix has no states",
    "enable_streaming_session": "a reused prefix has no states",
    "radix_cache_backend": "a reused prefix has no states",
    "kv_events_config": "publishes events of a prefix cache that is off",
    "enable_lora": "states would be an adapter's, not the model's",
    "lora_paths": "states would be an adapter's, not the model's",
    "forward_hooks": "code of others in the forward",
    "dllm_algorithm": "a diffusion model's forwards aren't a prefill",
    "enable_encoder_swa_bounded_replay": "replays parts of a prefill",
    "enable_decoder_swa_bounded_replay": "replays parts of a prefill",
    "debug_tensor_dump_output_folder": "replaces the model's forward",
    "json_model_override_args": "the model would be another than its config.json says",
}
"""Arguments under which states would be missing or silently wrong. A value that leaves it off is accepted."""
REFUSED_PREFIXES: Mapping[str, str] = {
    "speculative_": "speculative decoding changes forwards and what they return",
    "decoupled_spec_": "speculative decoding changes forwards and what they return",
    "disaggregation_": "prefill and decode are separate engines",
    "elastic_ep_": "ranks that come and go run without the hook",
    "ep_join_": "ranks that come and go run without the hook",
}
FORCED_ON: Mapping[str, str] = {
    "disable_radix_cache": "a reused prefix has no states",
    "disable_cuda_graph": "CUDA graphs of a prefill run past Python hooks",
    "disable_prefill_cuda_graph": "CUDA graphs of a prefill run past Python hooks",
    "disable_piecewise_cuda_graph": "CUDA graphs of a prefill run past Python hooks",
}
"""Arguments that are always True; saying False is refused."""
OFF_VALUES: tuple[Any, ...] = ("null", "none", "off", "auto", "", "{}", [], ())


def refused_flags(given: Mapping[str, Any]) -> dict[str, str]:
    """Which of the user's SGLang arguments can't be accepted, each with the reason. Needs no SGLang."""
    refused: dict[str, str] = {}
    for written, value in given.items():
        name = _field_name(written)
        if name in DECIDED:
            refused[written] = DECIDED[name]
        elif name in FORCED_ON:
            if value is not True:
                refused[written] = FORCED_ON[name]
        elif name == "chunked_prefill_size":
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                refused[written] = "without chunks a forward has no bound, and neither has the ring"
        elif not _is_off(name, value) and (why := _why_refused(name)) is not None:
            refused[written] = why
    return refused


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuses what `refused_flags` names.

    Raises:
        CaptureRefused: names every argument and its reason.
    """
    refused = refused_flags(given)
    if refused:
        reasons = "; ".join(f"{name}={given[name]!r} ({why})" for name, why in refused.items())
        raise CaptureRefused(f"engine.args can't hold {reasons}; take it out of the run file")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Checks names against the fields of the installed SGLang.

    Raises:
        ConfigError: an unknown name, with the closest known one.
    """
    fields = set(known)
    for written in given:
        if _field_name(written) in fields:
            continue
        close = difflib.get_close_matches(_field_name(written), fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"engine.args: this SGLang has no argument {written!r}{hint}")


def declared_fields() -> tuple[str, ...]:
    """Names of the installed SGLang's server arguments, read from its source; empty where there is no SGLang.

    Importing it takes seconds and its CPU build needs preparations, so a run file is checked against the
    declarations: annotated fields of `ServerArgs`, and of the groups that newer releases assemble it from.
    """
    package = importlib.util.find_spec("sglang")
    roots = [Path(place, "srt") for place in (package.submodule_search_locations or ())] if package else []
    return tuple(dict.fromkeys(name for root in roots for name in fields_below(root)))


def fields_below(root: Path) -> Iterator[str]:
    """Annotated fields of `ServerArgs` and its groups in SGLang's ``srt`` folder."""
    main = root / "server_args.py"
    for file in (main, *sorted(root.glob("arg_groups/fields/**/*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (file != main or node.name == "ServerArgs"):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        yield line.target.id


def chunk_tokens(spec: EngineSpec) -> int:
    """Most tokens of one forward: the engine's chunked_prefill_size."""
    given = {_field_name(k): v for k, v in spec.server_args.items()}
    default = GPU_CHUNK_TOKENS if spec.gpus else CPU_CHUNK_TOKENS
    return int(given.get("chunked_prefill_size", default))


def forward_bytes(spec: EngineSpec) -> int:
    """Room that the largest forward takes in the ring: every state and the token ids."""
    layout, rows = spec.capture.layout, chunk_tokens(spec)
    per_state = aligned(rows * layout.hidden_size * layout.itemsize)
    return per_state * layout.num_states + aligned(rows * 4)


def ring_bytes(spec: EngineSpec) -> int:
    """Size of each replica's ring: what the spec says, or room for four forwards where it says 0.

    Raises:
        ConfigError: smaller than two forwards.
    """
    need = RING_FORWARDS * forward_bytes(spec)
    size = spec.ring_bytes or AUTO_RING_FORWARDS * forward_bytes(spec)
    if size < need:
        raise ConfigError(
            f"a ring of {size} bytes doesn't hold two forwards of {chunk_tokens(spec)} tokens, which need "
            f"{need} ({spec.capture.layout.bytes_per_token} bytes a token); lower "
            "engine.args.chunked_prefill_size"
        )
    return aligned(size)


def capture_memory(spec: EngineSpec) -> dict[str, int]:
    """What capture takes beside the engine's own memory, at most.

    Returns:
        ``gpu_bytes`` on each replica's first GPU, of what mem_fraction_static leaves free; ``pinned_host_bytes``, the
        ring of each replica. Zeros for an engine on the CPU, whose ring isn't pinned.
    """
    if not spec.gpus:
        return {"gpu_bytes": 0, "pinned_host_bytes": 0}
    states_bytes = chunk_tokens(spec) * spec.capture.layout.bytes_per_token
    return {"gpu_bytes": GPU_FORWARDS * states_bytes, "pinned_host_bytes": ring_bytes(spec)}


def server_args(spec: EngineSpec, fields: Iterable[str]) -> dict[str, Any]:
    """Everything that SGLang's engine is started with.

    Args:
        spec: the engine.
        fields: the installed SGLang's arguments, from `adapter.installed_fields`.

    Raises:
        CaptureRefused: an argument that capture can't live with.
        ConfigError: an argument that this SGLang doesn't have.
    """
    known = set(fields)
    check_flags(spec.server_args)
    check_names(spec.server_args, known)
    args: dict[str, Any] = dict(_cpu_defaults() if spec.gpus == 0 else {})
    args["log_level"] = "info"
    # Prompts are token ids; a multimodal model's processor would be loaded for nothing, and may be missing.
    args["enable_multimodal"] = False
    args.update({_field_name(k): v for k, v in spec.server_args.items()})
    args.update(
        model_path=spec.model_path,
        trust_remote_code=spec.trust_remote_code,
        dtype=spec.dtype,
        tp_size=max(1, spec.gpus // spec.replicas),
        dp_size=spec.replicas,
        skip_tokenizer_init=True,
        chunked_prefill_size=chunk_tokens(spec),
    )
    args.update(dict.fromkeys(FORCED_ON, True))
    return {name: value for name, value in args.items() if name in known}


def _cpu_defaults() -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 16_384,
    }


def _is_off(name: str, value: Any) -> bool:
    """Whether a value leaves its feature off; 1 does so where it is a number of ranks or nodes."""
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value == 0 or (value == 1 and name.endswith(("_size", "nnodes")))
    return value in OFF_VALUES


def _why_refused(name: str) -> str | None:
    if name in REFUSED:
        return REFUSED[name]
    return next((why for prefix, why in REFUSED_PREFIXES.items() if name.startswith(prefix)), None)


def _field_name(written: str) -> str:
    """The Python name of an argument that may be written as on the command line."""
    return re.sub("-", "_", written.lstrip("-"))
