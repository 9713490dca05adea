"""What an engine on a CPU says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.capture import cpu

MILAN = "flags\t\t: fpu sse4_2 fma avx2 sha_ni\n"
GENOA = "flags\t\t: fpu sse4_2 fma avx2 avx512f avx512_bf16\n"
GRAVITON = "Features\t: fp asimd asimdhp bf16 i8mm\n"


@pytest.mark.parametrize(
    ("info", "dtype", "slow"),
    [
        (MILAN, "bfloat16", True),
        (MILAN, "float32", False),
        (GENOA, "bfloat16", False),
        (GRAVITON, "bfloat16", False),
        (None, "bfloat16", False),
    ],
)
def test_a_cpu_without_instructions_for_the_model_s_type_is_named(
    info: str | None, dtype: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    assert ("model.dtype: float32" in (cpu.slow_type(dtype) or "")) == slow
