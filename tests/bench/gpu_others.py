"""The cases of `bench_gpu` that are no engine of hsdump's: SGLang by itself, and other ways to get the states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gpu_baselines as baselines
from gpu_models import thin_out
from gpu_report import MARGIN_S, rows_of, say

from actors.capture.boundary import capture_spec
from actors.capture.cpu import prepare_environment
from actors.messages import EngineSpec
from storage.files import Store
from storage.prompts import LossMask, PromptSpec, PromptTable, prepare

if TYPE_CHECKING:
    from bench_gpu import Bench

IN_PROCESSES = ("torch-save", "return-hidden-states", "plain-stock", "plain-default", "hf")
TORCH_SAVE_PART, RETURN_HIDDEN_PART = 0.25, 0.015
"""Parts of a round's tokens that the slow ways get."""


def run_others(bench: Bench, cases: list[str]) -> None:
    """SGLang by itself, and the other ways."""
    config = bench.shape.config
    capture = capture_spec(
        "eagle3", final=False, final_normed=True, num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"], dtype="bfloat16", chunk_rows=32, shard_rows=16384,
    )  # fmt: skip
    store = Store(str(bench.folder / "baselines"))
    spec = PromptSpec(
        url=str(bench.prompts), tokenizer_path=str(bench.model), max_tokens=1 << 17, loss_mask=LossMask("all"),
        vocab_size=bench.shape.vocab_size,
    )  # fmt: skip
    prepare(store, spec)
    table = PromptTable(store)

    def samples(share: float) -> list[Any]:
        rows = thin_out(table.tokens, max(1, int(bench.tokens * share)))
        return [table.load(row).token_ids for row in rows]

    rounds, window = bench.options.rounds, 4 * bench.options.batch
    plain = {baselines.PLAIN: samples(0.8)}
    if "torch-save" in cases:
        arms = {baselines.PLAIN: samples(0.5), baselines.TORCH_SAVE: samples(TORCH_SAVE_PART)}
        arguments = (stock_args(bench), arms, rounds, window, capture)
        one_process(bench, "torch-save", baselines.serve, arguments)
    if "plain-default" in cases:
        args = {**default_args(bench), "log_level": "warning"}
        one_process(bench, "plain-default", baselines.serve, (args, plain, rounds, window, None))
    if "hf" in cases:
        gpu, seconds = bool(bench.options.gpus), bench.options.seconds
        arguments = (str(bench.model), samples(1.0), capture.boundaries, seconds, gpu)
        one_process(bench, "hf", baselines.hugging_face, arguments)
    if "return-hidden-states" in cases:
        # Not beside another arm: an engine started for it copies every request's states.
        args = {**stock_args(bench), "enable_return_hidden_states": True}
        arms = {baselines.RETURN_HIDDEN: samples(RETURN_HIDDEN_PART)}
        one_process(bench, "return-hidden-states", baselines.serve, (args, arms, rounds, window, None))
    if "plain-stock" in cases:
        one_process(bench, "plain-stock", baselines.serve, (stock_args(bench), plain, rounds, window, None))


def stock_args(bench: Bench) -> dict[str, Any]:
    """SGLang's arguments with everything that hsdump forces."""
    from actors.capture.flags import installed_fields, server_args

    if not bench.options.gpus:
        prepare_environment()
    spec = EngineSpec(
        name="baseline", kind="sglang", prompts_url="", run_id="", model_path=str(bench.model), dtype="bfloat16",
        gpus=bench.options.gpus, replicas=1, trust_remote_code=False, capture=None, ring_bytes=0, log_dir="",
        load_timeout_s=0, stall_timeout_s=0, server_args=bench.engine_args(),
    )  # type: ignore[arg-type]  # fmt: skip
    return {**server_args(spec, installed_fields()), "log_level": "warning"}


def default_args(bench: Bench) -> dict[str, Any]:
    """SGLang's own defaults, but for backends that an installation may lack."""
    args = {k: v for k, v in stock_args(bench).items() if not k.startswith(("disable_", "chunked", "max_"))}
    return args if bench.options.gpus else {**args, "max_total_tokens": 32768, "disable_cuda_graph": True}


def one_process(bench: Bench, case: str, target: Any, arguments: tuple[Any, ...]) -> None:
    """Runs one baseline and adds its rows."""
    left = bench.left_s - MARGIN_S
    if left < 45:
        bench.report.failed(case, bench.common, f"skipped: {bench.left_s:.0f} s were left")
        return
    out = bench.folder / f"{case}.jsonl"
    error = baselines.in_process(target, arguments, out, left, bench.options.start_s)
    lines = baselines.read_rounds(out)
    for line in lines:
        bench.report.log(**bench.common, case=case, **line)
        say(f"{case}: {line}")
    rounds = [line for line in lines if "arm" in line]
    if case.startswith("plain-"):
        rounds = [{**r, "arm": case} for r in rounds]
    rows = rows_of(rounds, "plain", bench.common)
    if bench.report.plain_speed(bench.common):  # a row for plain is there from a longer measurement
        rows = [row for row in rows if row["case"] != "plain"]
    bench.report.add([with_ratio(bench, row) for row in rows])
    if error is not None or not rows:
        bench.report.failed(
            case if not rows else f"{case} (end)", bench.common, error or "it measured nothing"
        )


def with_ratio(bench: Bench, row: dict[str, Any]) -> dict[str, Any]:
    """A row of another engine process than plain's, with the ratio to plain's median, and that said."""
    if row["ratio_to_plain"] is None and (plain := bench.report.plain_speed(bench.common)):
        row["ratio_to_plain"] = round(row["tokens_per_s"] / plain, 4)
        row["note"] = "ratio to plain's median in another engine process"
    return row
