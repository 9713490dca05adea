import subprocess
import sys

import pytest

from actors.capture.boundary import capture_spec
from actors.capture.flags import (
    DECIDED,
    FORCED_ON,
    REFUSED,
    REFUSED_PREFIXES,
    capture_memory,
    check_flags,
    check_names,
    chunk_tokens,
    declared_fields,
    forward_bytes,
    refused_flags,
    ring_bytes,
    server_args,
)
from actors.messages import EngineSpec
from storage.errors import CaptureRefused, ConfigError

FIELDS = {
    "model_path", "trust_remote_code", "dtype", "tp_size", "dp_size", "skip_tokenizer_init", "log_level",
    "chunked_prefill_size", "disable_radix_cache", "disable_cuda_graph", "device", "attention_backend",
    "grammar_backend", "mem_fraction_static", "max_total_tokens", "context_length",
}  # fmt: skip


def engine(gpus=0, replicas=1, ring=0, hidden=7168, **args):
    capture = capture_spec(
        [3, 31, 59], final=True, final_normed=False, num_layers=61, hidden_size=hidden, dtype="bfloat16",
        chunk_rows=32, shard_rows=64,
    )  # fmt: skip
    return EngineSpec(
        "engine-0", "sglang", "", "run", "/models/m", "bfloat16", gpus, replicas, False, capture, ring, "/logs",
        60.0, 60.0, args,
    )  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"disable_radix_cache": False},
        {"speculative_algorithm": "EAGLE3"},
        {"speculative-draft-model-path": "x"},
        {"pp_size": 2},
        {"enable_dp_attention": True},
        {"attn_cp_size": 2},
        {"enable_two_batch_overlap": True},
        {"disaggregation_mode": "prefill"},
        {"use_ray": True},
        {"enable_piecewise_cuda_graph": True},
        {"disable_cuda_graph": False},
        {"enable_return_hidden_states": True},
        {"nnodes": 2},
        {"node_rank": 1},
        {"dist-init-addr": "10.0.0.1:5000"},
        {"elastic_ep_backend": "mooncake"},
        {"enable_mixed_chunk": 1},
        {"allow_auto_truncate": True},
        {"chunked_prefill_size": -1},
        {"tokenizer_path": "x"},
        {"kv_events_config": "{}x"},
        {"model_path": "x"},
        {"tp_size": 4},
    ],
)
def test_flags_that_would_make_a_dump_silently_wrong_are_refused_by_name(given):
    (name,) = given
    with pytest.raises(CaptureRefused, match=rf"{name}=.*take it out of the run file"):
        check_flags(given)


@pytest.mark.parametrize("name", [*REFUSED, *(f"{prefix}x" for prefix in REFUSED_PREFIXES)])
def test_every_refused_flag_is_named_with_its_reason(name):
    with pytest.raises(CaptureRefused, match=rf"{name}='x' \(\w+.*\); take it out of the run file"):
        check_flags({name: "x"})


ALIASES = {"model", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"}
OLDER = {
    "disable_piecewise_cuda_graph", "enable_piecewise_cuda_graph", "enable_nsa_prefill_context_parallel",
    "enable_prefill_context_parallel",
}  # fmt: skip
"""Names that releases before the installed one have; harmless if it doesn't know them."""


def test_refused_and_forced_flags_are_flags_of_the_installed_sglang():
    """A misspelt refusal would never refuse anything."""
    known = set(declared_fields())
    assert len(known) > 300
    assert {*DECIDED, *REFUSED, *FORCED_ON} - known <= ALIASES | OLDER
    assert all(any(name.startswith(p) for name in known) for p in REFUSED_PREFIXES)


def test_an_unknown_argument_is_found():
    check_names(["mem_fraction_static", "--attention-backend"], declared_fields())
    with pytest.raises(ConfigError, match="did you mean attention_backend"):
        check_names(["attention_backand"], declared_fields())


def test_the_arguments_that_sglang_knows_are_read_without_importing_it():
    code = (
        "import sys, actors.capture.flags as flags; flags.declared_fields(); print('sglang' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out == "False\n"


@pytest.mark.parametrize(
    "given",
    [
        {"pp_size": 1},
        {"nnodes": 1},
        {"node_rank": 0},
        {"speculative_algorithm": None},
        {"disaggregation_mode": "null"},
        {"use_ray": False},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 4096},
        {"mem_fraction_static": 0.7},
        {"context_length": 9000},
        {"ep_size": 8},
    ],
)
def test_values_that_leave_a_refused_thing_off_and_harmless_flags_are_accepted(given):
    assert refused_flags(given) == {}


def test_every_reason_is_there_and_tables_do_not_overlap():
    assert not set(DECIDED) & set(REFUSED)
    assert all({**DECIDED, **REFUSED}.values())


def test_an_unknown_argument_gets_the_closest_name():
    with pytest.raises(ConfigError, match="'mem_fraction_statik'; did you mean mem_fraction_static"):
        check_names({"mem_fraction_statik": 1}, FIELDS)


def test_arguments_on_the_cpu_and_the_users_own_win_over_defaults():
    args = server_args(engine(max_total_tokens=99), FIELDS)
    assert args["device"] == "cpu"
    assert args["attention_backend"] == "torch_native"
    assert args["max_total_tokens"] == 99
    assert args["disable_radix_cache"] is True


def test_arguments_on_gpus_split_them_over_replicas():
    args = server_args(engine(gpus=8, replicas=2), FIELDS)
    assert (args["tp_size"], args["dp_size"]) == (4, 2)
    assert "device" not in args


def test_arguments_that_this_sglang_does_not_have_are_left_out():
    assert "disable_piecewise_cuda_graph" not in server_args(engine(), FIELDS)
    assert "disable_piecewise_cuda_graph" in server_args(engine(), FIELDS | {"disable_piecewise_cuda_graph"})


def test_the_ring_holds_two_forwards_or_is_refused():
    spec = engine(gpus=8)
    assert chunk_tokens(spec) == 8192
    assert forward_bytes(spec) >= 8192 * spec.capture.layout.bytes_per_token
    assert ring_bytes(spec) >= 2 * forward_bytes(spec)
    with pytest.raises(ConfigError, match="doesn't hold two forwards of 8192 tokens"):
        ring_bytes(engine(gpus=8, ring=2 * forward_bytes(spec) - 1))
    assert ring_bytes(engine(gpus=8, ring=2 * forward_bytes(spec))) == 2 * forward_bytes(spec)


def test_the_memory_that_capture_takes_follows_from_the_largest_forward():
    memory = capture_memory(engine(gpus=8, chunked_prefill_size=16384))
    assert memory["gpu_bytes"] == 3 * 16384 * 4 * 7168 * 2
    assert memory["pinned_host_bytes"] == ring_bytes(engine(gpus=8, chunked_prefill_size=16384))
    assert set(capture_memory(engine(gpus=0)).values()) == {0}
