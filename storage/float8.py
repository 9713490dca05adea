"""States as 8-bit floats: codes of type e4m3fn and one float32 scale for each token and state.

e4m3fn (OCP 8-bit Floating Point Specification, revision 1.0; Micikevicius et al., arXiv:2209.05433) has a sign, four
exponent bits with bias 7 and three mantissa bits, no infinities, NaN at 0x7f and 0xff, and 448 as its largest value:

    scale = max |x| / 448, 2**-126 at least        code = e4m3fn(x / scale), to nearest, ties to even
    x is about code * scale

Shape legend: n rows, H hidden size.
"""

from __future__ import annotations

import math

import torch

LARGEST = 448.0
"""Largest value of e4m3fn."""
EXPECTED_ERROR = 2**-3 / math.sqrt(12)
"""|code * scale - x| / |x| of a token, for roundings that are independent: uniform within a step, and a step of three
mantissa bits is at most an eighth of the value."""
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Value of each code: to look it up takes a third of the time of torch's own conversion on a CPU."""
BLOCK_ROWS = 256
"""Rows that are made floats again at a time: their float32 stays in the cache."""


def largest_error(hidden_size: int) -> float:
    """Bound of |code * scale - x| / |x| of a token of H finite elements, one of them at least 448 * 2**-126.

    Each element is off by half a step at most: 2**-4 of itself, or 2**-10 in units of the scale where it is below
    the smallest normal value, and the scale is at most |x| / 448.
    """
    return float(2**-4 + math.sqrt(hidden_size) * 2**-10 / LARGEST)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some tokens.

    Args:
        values: [n, H] of any float type, finite.

    Returns:
        uint8 [n, H], the codes' bits, and float32 [n].
    """
    x = values.float()
    # At least the smallest normal number: of zeros alone, and of numbers that flushing takes for zeros.
    scales = (x.abs().amax(dim=-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / scales[:, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Inverse of `quantise`, but for what rounding took.

    Args:
        codes: uint8 [n, H].
        scales: float32 [n].
        out: [n, H] of any float type, which is filled.
    """
    table = VALUES.to(codes.device)
    for start in range(0, len(codes), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        values = table.index_select(0, codes[rows].reshape(-1).int()).view(codes[rows].shape)
        out[rows] = values.mul_(scales[rows, None])


def rounded(values: torch.Tensor) -> torch.Tensor:
    """What becomes of some tokens, [n, H], on their way through `quantise` and back; float32 [n, H]."""
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    dequantise(*quantise(values), out)
    return out
