"""What the conformance cases measured, as files; and the table of docs/models.md that is made of them.

python tests/sglang/conformance_results.py docs/models.md bench/results/models-*.json
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from actors.capture.flags import DECIDED, FORCED_ON, REFUSED, REFUSED_PREFIXES

Row = dict[str, Any]

INTRODUCTION = """# Models, engine versions and flags

This page is written by the conformance suite (`make models`); don't edit it. Each row is one engine that was started
with a tiny random model of the family, in the class that SGLang uses for the real one. Every state of every token was
compared with Hugging Face transformers in float32: |captured - reference| / |reference| per token, over prompts of 1 to
700 tokens in one batch. *median* and *p99* are those of the worst state. **right** means: median below 0.02, of all
the reference's states the right one is the nearest by a factor of 3, p99 below 0.1 for dense models and below 0.35 for
mixtures of experts, where a router that tips the other way moves single tokens.

*Boundaries from* says where they are taken: at the model's own collector, or at the layers' inputs (boundary 0 always
is). Nobody keeps a list for that: the proof at each start finds it out ([ADR 7](adr/0007-what-the-proof-sees.md)).
A family that isn't here is accepted if that proof passes for it; so is another version of SGLang, with a warning. LFM2
and EXAONE-4 can't be tried on the CPU: their kernels need a GPU.

Gemma-2 and GPT-OSS are tried on GPUs only, since their attention (soft caps, sinks) needs a GPU backend; so are
tensor-parallel and data-parallel engines. Those tables come from `tests/gpu/run_conformance.py`. Quantised weights give
other states than the reference's: there only the nearest state is judged.
"""


def keep(path: Path, row: Row) -> None:
    """Adds a row to a results file, in place of an older one of the same case."""
    found = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = [r for r in found["rows"] if r["case"] != row["case"]]
    write(path, [*rows, row])


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes a results file: host, date and versions, then the rows."""
    head = {"host": host(), "date": datetime.date.today().isoformat(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n")


def host() -> str:
    """The GPUs with their driver, or the processor."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
        return "; ".join(sorted(set(answer.stdout.strip().splitlines())))
    return f"CPU, {platform.machine()}"


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("sglang", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """docs/models.md.

    Args:
        results: contents of the results files.
    """
    parts = [INTRODUCTION]
    for result in results:
        v = result["versions"]
        parts.append(f"\n## SGLang {v.get('sglang', '?')} on {result['host']}\n")
        parts.append(
            f"\ntorch {v.get('torch', '?')}, transformers {v.get('transformers', '?')}, Python {v['python']}, "
            f"{result['date']}.\n\n"
        )
        parts.append(
            "| family, class | flags | boundaries from | median | p99 | |\n| --- | --- | --- | --- | --- | --- |\n"
        )
        parts += [table_line(row) for row in result["rows"]]
    return "".join([*parts, refused_flags()])


def table_line(row: Row) -> str:
    name = f"{row['case']}, `{row['model']}`" if "model" in row else str(row["case"])
    if "states" not in row:
        said = f"not captured: {_cell(row['refused'])}{_note(row)}"
        return f"| {name} | {row.get('flags', '')} | | | | {said} |\n"
    median, p99 = (max(s[k] for s in row["states"]) for k in ("median", "p99"))
    said = "right" if row["right"] else _cell("; ".join(row["wrong"]))
    if row["not_provable"]:
        said += f"; not provable: {', '.join(row['not_provable'])}"
    return f"| {name} | {row['flags']} | {_place(row)} | {median:.4f} | {p99:.3f} | {said}{_note(row)} |\n"


def _note(row: Row) -> str:
    """What a person found out about a row; the only key that the suite doesn't write."""
    return f" ({_cell(row['note'])})" if "note" in row else ""


def _place(row: Row) -> str:
    if row["consulted"]:
        return "collector"
    return f"layers' inputs: {_cell(row['why_at_layers'])}"


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "/").split())[:300]


def refused_flags() -> str:
    """The arguments that a run file can't hold."""
    lines = ["\n## Arguments that are refused\n\nEach by name, before an engine starts.\n\n"]
    lines.append("| `engine.args` | why |\n| --- | --- |\n")
    table = {**REFUSED, **{f"{p}*": why for p, why in REFUSED_PREFIXES.items()}}
    table |= {f"{name}: false": why for name, why in FORCED_ON.items()}
    lines += [f"| {name} | {why} |\n" for name, why in table.items()]
    lines.append("\nDecided elsewhere in the run file, or by capture itself: " + ", ".join(DECIDED) + ".\n")
    return "".join(lines)


if __name__ == "__main__":
    target, *files = sys.argv[1:]
    Path(target).write_text(page([json.loads(Path(f).read_text()) for f in sorted(files)]))
