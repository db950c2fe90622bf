"""Layer norm: as RMS norm, but the backward keeps one more sum for each column."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.configurations.rms_norm import PART, WEIGHT_BACKWARD, forward, programs

__all__ = ["PART", "WEIGHT_BACKWARD", "backward", "forward", "programs"]

# Rows of up to this many numbers stay in registers in the backward.
WIDEST_BACKWARD = 8192
# Where the compiler spills a register to save an eighth: (architecture, width, numbers per lane).
_SPILLS = {("sm100", 4096, 8)}


def backward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """Two sums for each column, of the weight and of the bias, live as long as a program."""
    most = 1024 // architecture.lanes
    block = power_of_two(columns, at_least=16)
    if block > WIDEST_BACKWARD:
        known = {"ROWS": 1, "BLOCK": PART}
        return Config(known, warps=most // 2), Config(known, warps=most)
    several = max(1, min(16, 4096 // block))  # some 4 Ki numbers for each program
    return tuple(
        Config(
            {"ROWS": several, "BLOCK": block},
            warps=power_of_two(block * several // (numbers * architecture.lanes), 1, most),
        )
        for numbers in (8, 16)
        if (architecture.name, block, numbers) not in _SPILLS
    )
