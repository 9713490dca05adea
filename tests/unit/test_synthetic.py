"""States of the synthetic engine."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from actors.synthetic import SyntheticFaults, synthetic_rows, synthetic_states
from storage.errors import ConfigError
from storage.layout import Layout


def layout(dtype: str = "bfloat16") -> Layout:
    return Layout(states=(2, 5, "final"), hidden_size=16, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_value_is_finite_and_not_zero(dtype: str) -> None:
    bits = synthetic_states("a", 500, layout(dtype))
    assert bits.shape == (3, 500, 16)
    assert bits.dtype == layout(dtype).storage_dtype
    values = torch.from_numpy(bits).view(getattr(torch, dtype))
    assert torch.isfinite(values).all()
    assert (values != 0).all()


def test_states_are_the_same_in_every_process() -> None:
    code = (
        "from actors.synthetic import synthetic_states; from storage.layout import Layout; import sys;"
        "print(int(synthetic_states('a', 9, Layout(states=(2, 5, 'final'), hidden_size=16)).sum()))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(out) == int(synthetic_states("a", 9, layout()).sum())


def test_any_part_of_a_sample_equals_that_part_of_the_whole() -> None:
    whole = synthetic_states("a", 300, layout())
    assert np.array_equal(synthetic_rows("a", np.arange(64, 160), layout()), whole[:, 64:160])


def test_sample_state_and_position_show_in_the_values() -> None:
    a, b = synthetic_states("a", 200, layout()), synthetic_states("b", 200, layout())
    for other in (b, np.roll(a, 1, axis=0), np.roll(a, 1, axis=1)):
        assert (a != other).any(axis=2).mean() > 0.99


def test_fault_plan_may_be_for_some_engines_only() -> None:
    plan = SyntheticFaults(tokens_per_s=100.0, jitter=0.5, die_at_sample=3, engines=("engine-1",))
    assert plan.of("engine-1") is plan
    assert plan.of("engine-0") == SyntheticFaults(tokens_per_s=100.0, jitter=0.5)


def test_jitter_varies_the_time_of_a_sample_within_its_share() -> None:
    plan = SyntheticFaults(tokens_per_s=100.0, jitter=0.5)
    times = [plan.seconds(f"s{i}", 200) for i in range(500)]
    assert 1.0 <= min(times) < 1.1
    assert 2.9 < max(times) <= 3.0
    assert plan.seconds("s7", 200) == times[7]


def test_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="jitter 2"):
        SyntheticFaults(jitter=2)


def test_module_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "import actors.synthetic, actors.coordinator"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
