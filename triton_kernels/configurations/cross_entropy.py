"""Cross entropy: how much of a row of logits a program takes at a time."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# The forward reads a longer row in parts of this many numbers.
PART = 8192
# The backward needs nothing of a row but what it writes: a program takes this many numbers.
WRITTEN = 4096


def forward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    """One program goes along whole rows: the more warps, the more of a row is on its way."""
    block = power_of_two(columns, at_least=16, at_most=PART)
    rows = max(1, min(16, 2048 // block))
    found = [_tile(architecture, rows, block, numbers_per_lane=16)]
    if columns > PART and columns % 16 == 0:
        found.append(_tile(architecture, 1, PART, numbers_per_lane=8))
        found.append(_tile(architecture, 1, PART // 2, numbers_per_lane=16))
    elif columns > PART:  # rows begin anywhere: an address for each number, which takes registers
        found.append(_tile(architecture, 1, PART // 2, numbers_per_lane=32))
    return tuple(found)


def backward(architecture: Architecture, columns: int) -> tuple[Config, ...]:
    block = power_of_two(columns, at_least=16, at_most=WRITTEN)
    rows = max(1, min(16, WRITTEN // 2 // block))
    return tuple(_tile(architecture, rows, block, numbers_per_lane=per) for per in (16, 8))


def _tile(architecture: Architecture, rows: int, block: int, numbers_per_lane: int) -> Config:
    most = 1024 // architecture.lanes
    warps = power_of_two(rows * block // (numbers_per_lane * architecture.lanes), 1, most)
    return Config({"ROWS": rows, "BLOCK": block}, warps=warps)
