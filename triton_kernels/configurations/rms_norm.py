"""RMS norm: how many rows a program takes, and how wide a row may be before it is read in parts."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# Rows of up to this many numbers stay in registers from the first read to the write.
WIDEST = 32768
# A wider row is read in parts of this many.
PART = 8192

# The gradient of the weight of wide rows: columns by rows.
WEIGHT_BACKWARD = Config({"ROWS": 16, "BLOCK": 256}, warps=4)


def forward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """For the kernels that keep whole rows in registers: tile ROWS x BLOCK."""
    return _rows(architecture, columns, WIDEST, numbers_per_lane=16)


def backward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """Several tensors at once and a sum for each column: fewer numbers for each thread."""
    return _rows(architecture, columns, WIDEST // 2, numbers_per_lane=8)


def _rows(
    architecture: Architecture, columns: int, widest: int, numbers_per_lane: int
) -> tuple[Config, ...]:
    most = 1024 // architecture.lanes

    def warps(numbers: int) -> int:
        return power_of_two(numbers // (numbers_per_lane * architecture.lanes), 1, most)

    block = power_of_two(columns, at_least=16)
    if block > widest:
        known = {"ROWS": 1, "BLOCK": PART}
        return Config(known, warps=warps(PART)), Config(known, warps=most)
    several = max(1, min(16, 4096 // block))  # some 4 Ki numbers for each program
    found = [Config({"ROWS": several, "BLOCK": block}, warps=warps(block * several))]
    if several > 1:
        found.append(Config({"ROWS": 1, "BLOCK": block}, warps=min(most, 2 * warps(block))))
    elif found[0].warps < most:
        found.append(Config({"ROWS": 1, "BLOCK": block}, warps=2 * found[0].warps))
    return tuple(found)


def programs(architecture: Architecture, rows: int) -> int:
    """How many programs share the rows of a backward: each sums a weight gradient of its own."""
    return max(1, min(rows, architecture.units * 2))
