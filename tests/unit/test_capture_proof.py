import json

import pytest

from actors.capture.boundary import capture_spec
from actors.capture.proof import (
    FAILED,
    PASSED,
    UNPROVABLE,
    check,
    collector_is_wrong,
    finish_report,
    judge_hooks,
    judge_identity,
    judge_ranks,
    judge_token,
    probe_tokens,
    report_lines,
)
from storage.errors import ProofFailed

CAPTURE = capture_spec(
    [2, 4], final=True, final_normed=False, num_layers=8, hidden_size=8, dtype="bfloat16", chunk_rows=32,
    shard_rows=64,
)  # fmt: skip
HEAD = {"engine": "engine-0", "sglang": "0.5.23", "model": "LlamaForCausalLM", "states": [2, 4, "final"]}


def process(tp=0, dp=0, **more):
    return {
        "pid": 100 + 10 * dp + tp,
        "hooked": "llama.LlamaModel.forward",
        "setter": "set_dflash_layers_to_capture([1, 3])",
        "consulted": [2, 4],
        "read_at_layers": [],
        "places": [],
        "why_at_layers": "",
        "contract_kept": True,
        "copies": tp == 0,
        "tp_rank": tp,
        "dp_rank": dp,
    } | more


def statuses(hooked, processes, replicas):
    return [c["status"] for c in judge_hooks(hooked, CAPTURE, processes, replicas)]


def test_hooks_in_all_processes_of_two_replicas_pass():
    assert statuses([process(tp, dp) for dp in (0, 1) for tp in (0, 1)], 4, 2) == [PASSED] * 4


@pytest.mark.parametrize(
    ("hooked", "failing"),
    [
        ([process(0)], 0),
        ([process(0), process(1, copies=True)], 1),
        ([process(0, copies=False), process(1)], 1),
        ([process(0), process(1, consulted=[3, 5])], 2),
        ([process(0), process(1, read_at_layers=[2])], 2),
        ([process(0), process(1, contract_kept=False)], 3),
    ],
)
def test_each_thing_wrong_with_the_hooks_fails_its_own_check(hooked, failing):
    found = statuses(hooked, 2, 1)
    assert [i for i, status in enumerate(found) if status == FAILED] == [failing]


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"median": 0.003, "max": 0.007, "neighbour": 3, "neighbour_median": 0.9}, PASSED),
        ({"median": 0.003, "max": 0.007}, PASSED),
        ({"median": 0.9, "max": 1.2, "neighbour": 3, "neighbour_median": 0.003}, FAILED),
        ({"median": 0.019, "max": 0.1, "neighbour": 3, "neighbour_median": 0.03}, FAILED),
        ({"median": float("nan"), "max": 0.1}, FAILED),
        ({"unprovable": "fused"}, UNPROVABLE),
        ({"missing": "its place wasn't passed"}, FAILED),
    ],
)
def test_identity_needs_a_small_error_and_a_far_neighbour(found, status):
    assert judge_identity({"state": 2, **found}, 0)["status"] == status


def test_next_token_far_below_the_maximum_or_another_tensor_fails():
    good = {"token": 5, "gap": 0.001, "same_object": True}
    assert [c["status"] for c in judge_token(good, 0)] == [PASSED, PASSED]
    assert judge_token({**good, "gap": 0.3}, 0)[0]["status"] == FAILED
    assert judge_token({**good, "same_object": False}, 0)[1]["status"] == FAILED
    assert judge_token(None, 0)[0]["status"] == UNPROVABLE


def test_ranks_that_say_nothing_or_something_else_fail():
    own = {"norms": {"2": [1.0, 2.0], "final": [3.0, 3.0]}}
    assert judge_ranks({"identity": own}, 1, 0) == []
    found = {"identity": own, "rank 1": {"norms": {"2": [1.0, 2.001]}}}
    assert [c["status"] for c in judge_ranks(found, 2, 0)] == [PASSED]
    assert judge_ranks(found, 3, 0)[0]["detail"] == "rank 2 said nothing"
    found["rank 1"]["norms"]["2"][1] = 2.1
    assert judge_ranks(found, 2, 0)[0]["status"] == FAILED


def test_a_failed_check_stops_the_start_and_is_named():
    with pytest.raises(ProofFailed, match=r"LlamaForCausalLM would be wrong.*: identity of 4: median 0.9$"):
        finish_report(HEAD, [process()], [check("identity of 4", False, "median 0.9"), check("x", True, "y")])


def test_the_report_is_json_and_reads_in_five_lines():
    checks = [check("identity of 2", True, "median 0.003", 0), check("identity of 4", None, "fused input", 0)]
    report = finish_report(HEAD, [process()], checks)
    lines = report_lines(json.loads(json.dumps(report)))
    assert len(lines) == 5
    assert "llama.LlamaModel.forward in 1 scheduler process(es), pid 100" in lines[0]
    assert "[2, 4] by the model's own collector" in lines[1]
    assert "2 median 0.003; 4 not provable here: fused input" in lines[2]
    assert "1 checks passed, 0 failed, 1 not provable here (identity of 4: verify some samples, " in lines[4]


def test_only_a_wrong_state_of_the_collector_calls_for_another_place():
    wrong = judge_identity({"state": 4, "median": 0.9, "max": 1.0}, 0)
    assert collector_is_wrong([wrong], [process()])
    assert not collector_is_wrong([wrong], [process(consulted=[2], read_at_layers=[4])])
    assert not collector_is_wrong(
        [judge_identity({"state": "final", "median": 0.9, "max": 1.0}, 0)], [process()]
    )
    assert not collector_is_wrong([check("outputs are the same with and without", False, "")], [process()])


def test_the_probe_is_the_same_every_time_and_inside_the_vocabulary():
    assert (probe_tokens(1024, 96) == probe_tokens(1024, 96)).all()
    assert 102 <= probe_tokens(1024, 96).min() <= probe_tokens(1024, 96).max() < 614
