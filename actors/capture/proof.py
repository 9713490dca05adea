"""The proof at start: on one probe prompt, before the first sample, at any model size.

It runs the whole way that samples will take and says what it saw: `ProofFailed` when states would be wrong,
and "not provable here" with the reason where a family doesn't allow a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.messages import Batch, CaptureSpec, SampleRef, plan_segments
from storage.errors import ProofFailed

PROBE_TOKENS = 96
NEW_TOKENS = 8
IDENTITY_MEDIAN = 0.02
"""Largest median of |input_norm(captured) - read| / |read| per token: bf16 rounding gives 0.002-0.007, one
layer off 0.5 and more."""
NEIGHBOUR_FACTOR = 3.0
"""One layer off has to be at least so many times as far away."""
TOKEN_GAP = 0.02
"""How far below the maximum of lm_head over final_normed the engine's next token may be, as a share of the
largest logit: a few bf16 steps."""

RANKS_DIFFER = 0.01
"""How far the norm of a token on one tensor-parallel rank may be from that on rank 0."""

PASSED, FAILED, UNPROVABLE = "passed", "failed", "not provable here"
Check = dict[str, Any]
Report = dict[str, Any]


def probe_tokens(vocab_size: int, length: int) -> np.ndarray[Any, Any]:
    """Fixed token ids from the middle of the vocabulary, away from special tokens; int32 [length]."""
    low, high = vocab_size // 10, max(vocab_size // 10 + 1, vocab_size * 6 // 10)
    return np.random.default_rng(7).integers(low, high, size=length, dtype=np.int32)


def probe_batch(capture: CaptureSpec, name: str, length: int) -> Batch:
    """A batch of the probe alone."""
    return Batch(name, (SampleRef(0, 1, length, length),), plan_segments([length], capture.layout))


def check(name: str, passed: bool | None, detail: str, replica: int | None = None) -> Check:
    """One line of the proof; ``passed`` None means that it can't be proved here."""
    status = UNPROVABLE if passed is None else PASSED if passed else FAILED
    found: Check = {"check": name, "status": status, "detail": detail}
    return found if replica is None else {**found, "replica": replica}


def judge_hooks(
    hooked: Sequence[Mapping[str, Any]], capture: CaptureSpec, processes: int, replicas: int
) -> list[Check]:
    """The hook is in every process, collects what was asked, and one rank of each replica copies."""
    where = sorted({str(h["hooked"]) for h in hooked})
    checks = [
        check(
            "hook in every scheduler process",
            len(hooked) == processes,
            f"{len(hooked)} of {processes}: {where}",
        )
    ]
    copying = sorted((int(h["dp_rank"]), int(h["tp_rank"])) for h in hooked if h["copies"])
    wanted = [(r, 0) for r in range(replicas)]
    checks.append(check("rank 0 of each replica copies, no other", copying == wanted, f"copying: {copying}"))
    lists = sorted({tuple(sorted([*h["consulted"], *h["read_at_layers"]])) for h in hooked})
    places = f"{list(lists)}, asked {[capture.boundaries]}"
    checks.append(check("every boundary is taken once", lists == [capture.boundaries], places))
    kept = all(h["contract_kept"] for h in hooked)
    checks.append(check("the wrapper's contract is untouched", kept, "capture_aux_hidden_states is False"))
    return checks


def collector_is_wrong(checks: Sequence[Check], hooked: Sequence[Mapping[str, Any]]) -> bool:
    """Whether boundaries that the model's collector gave aren't what the layers read."""
    collected = {f"identity of {b}" for h in hooked for b in h["consulted"]}
    return any(c["check"] in collected and c["status"] == FAILED for c in checks)


def judge_identity(found: Mapping[str, Any], replica: int) -> Check:
    """What the attention read (or lm_head, for final) against what was captured."""
    name = f"identity of {found['state']}"
    if "missing" in found:
        return check(name, False, str(found["missing"]), replica)
    if "unprovable" in found:
        return check(name, None, str(found["unprovable"]), replica)
    median, worst = float(found["median"]), float(found["max"])
    detail = f"median {median:.4f}, max {worst:.4f}"
    passed = median < IDENTITY_MEDIAN
    if "neighbour_median" in found:
        off = float(found["neighbour_median"])
        detail += f"; against layer {found['neighbour']}: {off:.2f}"
        passed = passed and off > NEIGHBOUR_FACTOR * median
    return check(name, passed, detail, replica)


def judge_ranks(found: Mapping[str, Any], ranks: int, replica: int) -> list[Check]:
    """Tensor-parallel ranks compute the same states: norms of every token, against those of rank 0.

    Args:
        found: what the scheduler processes said of the proof, by kind.
        ranks: of the replica.
        replica: which.
    """
    if ranks < 2:
        return []
    own = found.get("identity", {}).get("norms", {})
    worst = 0.0
    for rank in range(1, ranks):
        others = found.get(f"rank {rank}", {}).get("norms", {})
        if not others:
            return [check("ranks agree", False, f"rank {rank} said nothing", replica)]
        for state, norms in others.items():
            difference = np.abs(np.subtract(norms, own[state])) / np.maximum(own[state], 1e-30)
            worst = max(worst, float(difference.max()))
    detail = f"norms of {ranks} ranks differ by {worst:.2g} at most"
    return [check("ranks agree", worst < RANKS_DIFFER, detail, replica)]


def judge_token(found: Mapping[str, Any] | None, replica: int) -> list[Check]:
    """The engine's next token against lm_head over the captured final_normed."""
    name = "next token is lm_head over final_normed"
    if found is None:
        return [check(name, None, "this model's logits processor isn't called as a module", replica)]
    if "unprovable" in found:
        return [check(name, None, str(found["unprovable"]), replica)]
    gap = float(found["gap"])
    detail = f"token {found['token']} is {gap:.4f} of the largest logit below the maximum"
    same = bool(found["same_object"])
    text = "the logits processor got the very tensor that the inner model returned"
    return [
        check(name, gap <= TOKEN_GAP, detail, replica),
        check("nothing changed on the way to lm_head", same, text if same else f"not so: {text}", replica),
    ]


def finish_report(head: Mapping[str, Any], hooked: Sequence[Any], checks: Sequence[Check]) -> Report:
    """The report as stored in capture_report.json.

    Raises:
        ProofFailed: a check failed; the message holds the failing ones.
    """
    failed = [c for c in checks if c["status"] == FAILED]
    report: Report = {
        **head,
        "passed": not failed,
        "processes": list(hooked),
        "checks": list(checks),
        "not_provable": [c["check"] for c in checks if c["status"] == UNPROVABLE],
    }
    if failed:
        lines = "; ".join(f"{c['check']}: {c['detail']}" for c in failed)
        raise ProofFailed(
            f"{head['engine']}: captured states of {head['model']} would be wrong, so nothing is collected: "
            f"{lines}"
        )
    return report


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report in five lines for a person: where the patch is, and what was proved."""
    checks: Sequence[Check] = report["checks"]
    processes = report["processes"]
    pids = ", ".join(str(p["pid"]) for p in processes)
    where = processes[0] if processes else {}
    count = {s: sum(c["status"] == s for c in checks) for s in (PASSED, FAILED, UNPROVABLE)}
    identity = [c for c in checks if c["check"].startswith("identity")]
    outputs = [c for c in checks if c["check"].startswith(("next token", "outputs"))]
    rest = ", ".join(report["not_provable"])
    return [
        f"capture: {report['engine']} runs {report['model']} on SGLang {report['sglang']}; hook on "
        f"{where.get('hooked')} in {len(processes)} scheduler process(es), pid {pids}",
        f"states: {', '.join(map(str, report['states']))}; {_sources(where)}",
        "identity: "
        + ("; ".join(f"{c['check'][12:]} {_short(c)}" for c in identity) or "nothing to compare")
        + _stand_in(checks),
        "outputs: " + "; ".join(f"{c['check']}: {c['status']}" for c in outputs),
        f"proof: {count[PASSED]} checks passed, {count[FAILED]} failed, {count[UNPROVABLE]} not provable here"
        + (f" ({rest}: verify some samples, hsdump verify DUMP --reference 4)" if rest else "")
        + (f"; {report['warning']}" if report.get("warning") else ""),
    ]


def _sources(where: Mapping[str, Any]) -> str:
    """Where the boundaries come from."""
    said = []
    if where.get("consulted"):
        said.append(f"{where['consulted']} by the model's own collector, {where['setter']}")
    if where.get("read_at_layers"):
        why = f" ({where['why_at_layers']})" if where["why_at_layers"] else ""
        said.append(f"{where['read_at_layers']} at {', '.join(where['places'])} of their layers{why}")
    return "; ".join(said) or "no boundaries below N"


def _stand_in(checks: Sequence[Check]) -> str:
    """What a small random model showed in place of the identity check."""
    found = [c for c in checks if c["check"].startswith("stand-in")]
    said = "; ".join(f"{c['check'][12:]} {_short(c)}" for c in found)
    return (
        f"; in place of that, a small random model of this class against Hugging Face: {said}" if said else ""
    )


def _short(c: Check) -> str:
    return str(c["detail"]) if c["status"] == PASSED else f"{c['status']}: {c['detail']}"
