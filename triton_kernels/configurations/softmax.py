"""Softmax: how many rows a program takes, and how wide a row may be before it is read in parts."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# Rows of up to this many numbers stay in registers from the read to the write.
WIDEST = 32768
# A wider row is read in parts of this many.
PART = 8192


def forward(architecture: Architecture, columns: int, neighbours: bool) -> tuple[Config, ...]:
    return _rows(architecture, columns, neighbours, WIDEST, numbers_per_lane=16)


def backward(architecture: Architecture, columns: int, neighbours: bool) -> tuple[Config, ...]:
    """Two tensors at once: fewer numbers for each lane."""
    return _rows(architecture, columns, neighbours, WIDEST // 2, numbers_per_lane=8)


def _rows(
    architecture: Architecture, columns: int, neighbours: bool, widest: int, numbers_per_lane: int
) -> tuple[Config, ...]:
    """`neighbours`: memory goes on from row to row, not along a row, so a program takes 16 rows
    at least, and rows in parts much sooner."""
    most = 1024 // architecture.lanes

    def tile(rows: int, block: int, numbers: int) -> Config:
        warps = power_of_two(rows * block // (numbers * architecture.lanes), 1, most)
        return Config({"ROWS": rows, "BLOCK": block}, warps=warps)

    block = power_of_two(columns, at_least=16)
    fewest = 16 if neighbours else 1
    if block * fewest > widest:
        block = PART // fewest
        return tile(fewest, block, numbers_per_lane), tile(fewest, block, numbers_per_lane // 2)
    several = max(fewest, min(16, 4096 // block))
    found = [tile(several, block, numbers_per_lane)]
    if several > fewest or found[0].warps < most:
        found.append(tile(fewest, block, numbers_per_lane // 2))
    return tuple(found)
