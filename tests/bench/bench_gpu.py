"""What capturing costs on GPUs, against the same engine without it and against other ways to get hidden states.

    python tests/bench/bench_gpu.py --model llama-8b --cases plain,discard,pipeline-disk,pipeline-shm,profile
    python tests/bench/bench_gpu.py --model llama-8b --cases torch-save,return-hidden-states,plain-default,hf
    python tests/bench/bench_gpu.py --model llama-8b --gpus 2 --engines 2 --cases plain,discard,pipeline-shm
    python tests/bench/bench_gpu.py --model tiny --gpus 0 --seconds 5      # rehearses all of it on a CPU

Random weights, random tokens, lognormal lengths with a mean of about 1,730 tokens. Arms take turns in every
round and ratios are of the same round; docs/performance.md says what each arm is. Writes gpu.json and
gpu-rounds.jsonl into $OUT or bench/out, adding to what is there. A case that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench"), str(ROOT / "tests/unit")]

import gpu_trace as trace  # noqa: E402
from gpu_models import LONGEST, SHAPES, lognormal_lengths, make_model, write_prompts  # noqa: E402
from gpu_others import IN_PROCESSES, run_others  # noqa: E402
from gpu_report import MARGIN_S, Report, rows_of, say  # noqa: E402

IN_ONE_ENGINE = ("plain", "discard", "pipeline-disk", "pipeline-shm", "profile", "memory")
PROFILE_TOKENS = 130_000


class Bench:
    """One invocation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.shape = SHAPES[options.model]
        self.report = Report(options.out)
        self.folder: Path = options.dir or Path(tempfile.mkdtemp(prefix="hsdump-bench-"))
        self.shm = Path(tempfile.mkdtemp(prefix="hsdump-bench-", dir="/dev/shm"))
        self.common = {"model": options.model, "gpus": options.gpus, "engines": options.engines}
        self.tokens = int(self.shape.rate * options.seconds * options.engines)
        self.gpus_per_engine = options.gpus // options.engines
        self.model = make_model(options.model, self.folder)
        longest = LONGEST if options.gpus else 1500
        lengths = lognormal_lengths(self.tokens, longest) + [options.long_tokens] * options.long
        self.prompts = self.folder / "prompts.jsonl"
        write_prompts(lengths, self.shape.vocab_size, self.prompts)
        say(f"{len(lengths)} samples, {sum(lengths):,} tokens, the longest {max(lengths):,}")

    @property
    def left_s(self) -> float:
        """Time that is left of the budget."""
        return float(self.options.budget_s) - (time.monotonic() - self.started)

    def tree(self) -> dict[str, Any]:
        """The run file that the engines and the dump are made from."""
        return {
            "model": {"path": str(self.model)},
            "capture": {"boundaries": "eagle3", "final_normed": True},
            "prompts": {"url": str(self.prompts), "loss_mask": "all", "max_tokens": 1 << 17},
            "output": str(self.folder / "template"),
            "engine": {
                "gpus": self.gpus_per_engine,
                "count": self.options.engines,
                "args": self.engine_args(),
            },
            "limits": {"batch_tokens": self.options.batch},
        }

    def engine_args(self) -> dict[str, Any]:
        """SGLang's arguments, beside those that capture decides."""
        args: dict[str, Any] = {"load_format": "dummy", "chunked_prefill_size": self.options.chunk}
        if not self.options.gpus:
            return {**args, "max_total_tokens": 32768}
        args |= {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
        if self.gpus_per_engine > 1:
            # Its default may use NVLink multicast, which some hosts don't allow.
            args["enforce_disable_flashinfer_allreduce_fusion"] = True
        # A token more than the longest sample, and no further: SGLang keeps tables of this length.
        return {**args, "max_prefill_tokens": self.options.chunk}

    # ---- arms in one engine process

    def in_one_engine(self, cases: list[str]) -> None:
        """Everything that hsdump's own engine does."""
        from gpu_rig import gpu_memory_mib, started_rig

        start_s = min(self.options.start_s, self.left_s - 30)
        store = self.options.store_gib << 30
        window = 4 * self.options.batch
        with started_rig(self.tree(), self.options.engines, window, store, start_s) as rig:
            say(f"engines are up; {self.left_s:.0f} s are left")
            for _, info in rig.engines:
                self.report.log(**self.common, engine=info.name, report=dict(info.capture_report))
            idle = gpu_memory_mib()
            rig.touch_store()
            engines = self.options.engines
            warm = rig.passes(False, self.tokens // 6, engines)
            plain_mib = gpu_memory_mib()
            caught = rig.passes(True, self.tokens // 6, engines)
            captured_mib = gpu_memory_mib()
            say(f"warm: {warm.tokens_per_s:,.0f} tokens/s, captured {caught.tokens_per_s:,.0f}")
            self.report.log(**self.common, warm=warm.details, warm_captured=caught.details)
            if "profile" in cases:
                self.guard("profile", lambda: self.profile(rig))
            rounds = self.rounds(rig, cases)
            if "memory" in cases:
                used = {"idle": idle, "after_plain": plain_mib, "after_capture": captured_mib}
                used["after_all"] = gpu_memory_mib()
                row = {"case": "memory", **self.common, "tokens_per_s": None, "ratio_to_plain": None}
                self.report.add([{**row, "memory": {**rig.memory(), "gpu_mib": used}}])
            single = "plain-one-engine" if engines > 1 else None
            self.report.add(rows_of(rounds, "plain", self.common, single))

    def rounds(self, rig: Any, cases: list[str]) -> list[dict[str, Any]]:
        """Every arm once a round; stops where the time is up."""
        engines = self.options.engines
        arms: dict[str, Any] = {"plain": lambda: rig.passes(False, rig.tokens, engines)}
        if engines > 1:
            arms["plain-one-engine"] = lambda: rig.passes(False, rig.tokens // engines, 1)
        arms["discard"] = lambda: rig.passes(True, rig.tokens, engines)
        arms["pipeline-disk"] = lambda: rig.pipeline(self.folder / "dump", self.options.writers)
        arms["pipeline-shm"] = lambda: rig.pipeline(self.shm / "dump", self.options.writers)
        wanted = {name: arm for name, arm in arms.items() if name in cases or name.startswith("plain")}
        took = dict.fromkeys(wanted, self.options.seconds * 1.5)
        rounds: list[dict[str, Any]] = []
        for i in range(self.options.rounds):
            for name, arm in list(wanted.items()):
                if self.left_s < took[name] + MARGIN_S:
                    say(
                        f"no time for {name} of round {i}: {self.left_s:.0f} s left, it takes {took[name]:.0f}"
                    )
                    return rounds
                begun = time.monotonic()
                speed = self.guard(name, arm)
                took[name] = time.monotonic() - begun
                if speed is None:
                    del wanted[name]
                    continue
                entry = {"round": i, "arm": name, **speed.details}
                rounds.append(entry)
                self.report.log(**self.common, **entry)
                self.report.add(rows_of(rounds, "plain", self.common))
                say(f"round {i} {name}: {speed.tokens_per_s:,.0f} tokens/s in {speed.details['seconds']} s")
        return rounds

    def profile(self, rig: Any) -> None:
        """Whether copies overlap with kernels, from a trace; of every rank where there are several."""
        folder = self.folder / "trace"
        folder.mkdir()
        rig.profile(folder, PROFILE_TOKENS if self.options.gpus else 3000, bool(self.options.gpus))
        found = {}
        for path in sorted(folder.iterdir()):
            rank = next((part for part in path.name.split(".")[0:2] if "TP" in part), path.name)
            found[rank[-4:]] = trace.overlap(trace.read(path))
        self.report.log(**self.common, profile=found)
        row = {"case": "profile", **self.common, "tokens_per_s": None, "ratio_to_plain": None}
        self.report.add([{**row, "profile": found}])
        say(f"profile: {found}")

    # ----

    def guard(self, case: str, work: Any) -> Any:
        """Does ``work``; its failure is a row."""
        try:
            return work()
        except Exception as error:
            traceback.print_exc()
            self.report.failed(case, self.common, f"{type(error).__name__}: {str(error)[:400]}")
            return None

    def run(self) -> None:
        """All cases, then the table."""
        cases = self.options.cases.split(",")
        unknown = set(cases) - set(IN_ONE_ENGINE) - set(IN_PROCESSES)
        if unknown:
            sys.exit(f"--cases: unknown {', '.join(sorted(unknown))}; known: {IN_ONE_ENGINE + IN_PROCESSES}")
        mine = [c for c in cases if c in IN_ONE_ENGINE]
        others = [c for c in cases if c in IN_PROCESSES]
        try:
            if mine:
                self.guard("+".join(mine), lambda: self.in_one_engine(mine))
            if others:
                self.guard("+".join(others), lambda: run_others(self, others))
        finally:
            shutil.rmtree(self.shm, ignore_errors=True)
            if self.options.dir is None:
                shutil.rmtree(self.folder, ignore_errors=True)
        print(self.report.table())


def options_from(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--cases", default=",".join(IN_ONE_ENGINE + IN_PROCESSES), help="comma-separated")
    parser.add_argument("--gpus", type=int, default=1, help="in all; 0 is the CPU")
    parser.add_argument("--engines", type=int, default=1, help="engines that share the GPUs")
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of an arm, about")
    parser.add_argument(
        "--budget_s", type=float, default=540.0, help="no case is begun that would outlast it"
    )
    parser.add_argument("--start_s", type=float, default=200.0, help="longest engine start")
    parser.add_argument("--chunk", type=int, default=16_384, help="chunked_prefill_size")
    parser.add_argument("--batch", type=int, default=32_768, help="tokens in a batch")
    parser.add_argument("--store-gib", type=int, default=16, help="object store of a cluster started here")
    parser.add_argument("--long", type=int, default=0, help="samples of --long-tokens tokens besides")
    parser.add_argument("--long-tokens", type=int, default=65_536)
    parser.add_argument("--dir", type=Path, default=None, help="scratch on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench/out"))
    return parser.parse_args(argv)


def main() -> None:
    Bench(options_from()).run()


if __name__ == "__main__":
    main()
