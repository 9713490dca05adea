import numpy as np
import pytest

from actors.capture.second_look import LOOK_TOKENS, SecondLook
from actors.capture.statistics import BAND_AFTER, EVERY_ROWS, Alarms, StateStatistics, to_float
from storage.layout import Layout

LAYOUT = Layout((2, "final"), 64, "bfloat16", 32, 64)


def bits(values):
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def chunk(seed, rows=64, scale=(1.0, 30.0)):
    rng = np.random.default_rng(seed)
    return [bits(rng.standard_normal((rows, 64)) * s) for s in scale]


def test_the_summary_agrees_with_numpy_over_the_rows_that_were_looked_at():
    statistics = StateStatistics(LAYOUT)
    chunks = [chunk(i) for i in range(40)]
    for states in chunks:
        statistics.look(states)
    for k, state in enumerate(("2", "final")):
        values = np.concatenate([to_float(c[k][::EVERY_ROWS], "bfloat16") for c in chunks])
        norms = np.linalg.norm(values, axis=1)
        found = statistics.summary()[state]
        assert found["tokens"] == len(values)
        assert found["mean"] == pytest.approx(values.mean(), abs=1e-5)
        assert found["std"] == pytest.approx(values.std(), rel=1e-4)
        for q, norm in found["norm_quantiles"].items():
            assert norm == pytest.approx(np.quantile(norms, float(q)), rel=0.05)
        assert sum(count for _, count in found["norm_counts"]) == len(values)


def test_no_norm_is_unusual_before_enough_were_seen():
    statistics = StateStatistics(LAYOUT)
    statistics.look(chunk(0))
    assert statistics.look(chunk(1, scale=(1e6, 1e6))) == []


def test_a_norm_out_of_its_states_band_is_named_with_sample_state_and_token():
    statistics, alarms = StateStatistics(LAYOUT), Alarms(LAYOUT)
    for i in range(BAND_AFTER * EVERY_ROWS // 64 + 1):
        assert statistics.look(chunk(i)) == []
    states = chunk(9999)
    states[1][EVERY_ROWS] = bits(to_float(states[1][EVERY_ROWS], "bfloat16") * 100)
    (outlier,) = statistics.look(states)
    assert (outlier.state, outlier.row) == (1, EVERY_ROWS)
    alarms.raise_for(7, 1000, [outlier])
    assert alarms.count == 1
    assert alarms.last_row == 7
    assert alarms.last.startswith(f"state final, token {1000 + EVERY_ROWS}: norm ")


def test_regular_massive_activations_are_in_the_band():
    statistics = StateStatistics(LAYOUT)
    for i in range(BAND_AFTER * EVERY_ROWS // 64 + 1):
        states = chunk(i)
        states[0][0] = bits(to_float(states[0][0], "bfloat16") * 500)  # as the first token's, in every sample
        assert statistics.look(states) == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_element_types_are_counted_too(dtype):
    layout = Layout((2,), 64, dtype, 32, 64)
    values = np.full((1, 64), 0.5, dtype)
    statistics = StateStatistics(layout)
    statistics.look([values.view(f"u{values.itemsize}")])
    assert statistics.summary()["2"]["mean"] == 0.5
    assert statistics.summary()["2"]["std"] == 0.0


def looked_at(first, second, tokens):
    look = SecondLook(LAYOUT, tokens)
    for start in range(0, tokens, 100):
        look.first(start, [s[start : start + 100] for s in first])
    look.put("rid", 0, [s[: look.tokens] for s in second], np.arange(look.tokens))
    return look


def test_a_second_capture_within_rounding_agrees_and_only_the_first_tokens_are_kept():
    first = chunk(1, rows=700)
    second = [bits(to_float(s, "bfloat16") * 1.01) for s in first]
    look = looked_at(first, second, 700)
    assert look.tokens == LOOK_TOKENS
    assert look.difference() is None


@pytest.mark.parametrize("state", [0, 1])
def test_rows_of_another_position_in_one_state_are_found(state):
    first = chunk(1, rows=100)
    second = [s.copy() for s in first]
    second[state] = np.roll(second[state], 1, axis=0)
    said = looked_at(first, second, 100).difference()
    assert said is not None
    assert said.startswith(f"state {('2', 'final')[state]}, captured in another forward, differs by 1.")


def test_a_second_capture_that_never_came_is_a_difference():
    look = SecondLook(LAYOUT, 50)
    look.first(0, chunk(1, rows=50))
    assert look.difference() is not None
    look.lost("rid", "the engine refused")
    assert look.difference() == "a second capture was lost: the engine refused"
