"""docs/models.md has every row that was measured and every argument that is refused."""

import json
from pathlib import Path

import conformance_results

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/models.md").read_text()
ROW = {
    "case": "llama", "model": "LlamaForCausalLM", "flags": "dtype=bfloat16", "consulted": [2], "right": True,
    "not_provable": [], "states": [{"median": 0.004, "p99": 0.01}, {"median": 0.006, "p99": 0.009}],
}  # fmt: skip


def test_every_row_of_the_results_is_on_the_page():
    files = sorted((ROOT / "bench/results").glob("models-*.json"))
    assert files
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            assert conformance_results.table_line(row) in PAGE


def test_a_row_has_its_worst_state_and_what_is_wrong_with_it():
    assert conformance_results.table_line(ROW) == (
        "| llama, `LlamaForCausalLM` | dtype=bfloat16 | collector | 0.0060 | 0.010 | right |\n"
    )
    wrong = ROW | {"right": False, "wrong": ["state 2: median 0.4"], "not_provable": ["identity of 4"]}
    assert conformance_results.table_line(wrong).endswith(
        "| state 2: median 0.4; not provable: identity of 4 |\n"
    )


def test_what_could_not_be_captured_is_a_row_with_its_reason():
    row = {"case": "gpt_oss", "flags": "", "refused": "ModelError: needs a\nGPU | backend"}
    assert conformance_results.table_line(row) == (
        "| gpt_oss |  | | | | not captured: ModelError: needs a GPU / backend |\n"
    )


def test_a_case_that_is_measured_again_replaces_its_row(tmp_path):
    path = tmp_path / "models-cpu.json"
    for right in (False, True):
        conformance_results.keep(path, {"case": "llama", "right": right})
    conformance_results.keep(path, {"case": "qwen3", "right": True})
    rows = json.loads(path.read_text())["rows"]
    assert rows == [{"case": "llama", "right": True}, {"case": "qwen3", "right": True}]
