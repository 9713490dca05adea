"""Judges and draws what train.py measured: python examples/drafter/report.py RESULTS.json OUT.

Writes OUT.json (`states`, `seed`, `first_loss`, `final_loss`, `heldout_loss`, `heldout_accuracy` of each run) and
OUT.png, prints a table, and fails unless the loss falls in every run and the captured states beat the shuffled ones
and the wrong final state by a tenth of held-out accuracy. The arm that is one boundary off is shown, not judged: which
layers one trains on is a choice, and what finds a wrong one is `hsdump verify --reference`. So is that of float8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

MARGIN = 1.10
KEPT = ("states", "seed", "steps", "first_loss", "final_loss", "heldout_loss", "heldout_accuracy", "seconds")
WHAT = {
    "captured": "as captured",
    "shuffled": "states of another sample",
    "final_wrong": "target normed twice",
    "off_by_one": "trained one boundary off",
    "float8": "as captured, in float8",
}


def accuracy(runs: list[dict[str, Any]], arm: str) -> list[float]:
    """Held-out accuracies of an arm, by seed."""
    return [run["heldout_accuracy"] for run in runs if run["states"] == arm]


def complaints(runs: list[dict[str, Any]]) -> list[str]:
    """What isn't as it must be; empty when all is."""
    found = [
        f"{run['states']} seed {run['seed']}: the loss doesn't fall, {run['first_loss']:.3f} to {run['final_loss']:.3f}"
        for run in runs
        if run["final_loss"] >= run["first_loss"]
    ]
    best = statistics.mean(accuracy(runs, "captured"))
    for arm in ("shuffled", "final_wrong"):
        other = statistics.mean(accuracy(runs, arm))
        if best < MARGIN * other:
            found.append(f"captured {best:.3f} doesn't beat {arm} {other:.3f} by a tenth")
    return found


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy of the arms, each seed a point, and the losses of seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, arm in enumerate(WHAT):
        values = accuracy(runs, arm)
        left.bar(i, statistics.mean(values), color=f"C{i}", alpha=0.6)
        left.plot([i] * len(values), values, "k.", markersize=6)
        losses = next(run["losses"] for run in runs if run["states"] == arm and run["seed"] == 0)
        right.plot(range(1, len(losses) + 1), losses, color=f"C{i}", label=arm, linewidth=1)
    labels = [f"{arm}\n{textwrap.fill(what, 15)}" for arm, what in WHAT.items()]
    left.set_xticks(range(len(WHAT)), labels, fontsize=7)
    left.set_ylabel("held-out accuracy, captured states")
    right.set_xlabel("step")
    right.set_ylabel("training loss (seed 0)")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("An EAGLE-3 drafter trained from a dump, and from what a dump must not hold", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path, help="Without a suffix.")
    args = parser.parse_args()
    runs = json.loads(args.results.read_text())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".tmp")
    partial.write_text(json.dumps([{name: run[name] for name in KEPT} for run in runs], indent=1) + "\n")
    os.replace(partial, args.out.with_suffix(".json"))
    draw(runs, args.out.with_suffix(".png"))
    print(f"{'arm':<12} {'':<26} held-out accuracy by seed       mean   final loss")
    for arm, what in WHAT.items():
        values = accuracy(runs, arm)
        final = statistics.mean(run["final_loss"] for run in runs if run["states"] == arm)
        shown = "  ".join(f"{value:.3f}" for value in values)
        print(f"{arm:<12} {what:<26} {shown:<30} {statistics.mean(values):.3f}   {final:.2f}")
    found = complaints(runs)
    for line in found:
        print(f"bad: {line}")
    print(
        f"{args.out.with_suffix('.json')} and {args.out.with_suffix('.png')} {'written' if not found else 'show why'}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
