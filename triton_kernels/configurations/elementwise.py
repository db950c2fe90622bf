"""Chains of elementwise operations: tiles of rows by columns."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# A chain of more steps than this keeps so many values at once that lanes get fewer numbers.
SHORT = 16


def tiles(
    architecture: Architecture, rows: int, columns: int, steps: int, crossed: bool
) -> tuple[Config, ...]:
    """Tile ROWS x BLOCK. `crossed`: for some tensor the neighbours are those along the rows, so
    that a tile has to be long in both directions."""
    found = []
    for numbers_per_lane in (8, 16) if steps <= SHORT else (8, 4):
        numbers = 4 * architecture.lanes * numbers_per_lane
        block = power_of_two(columns, at_least=16, at_most=32 if crossed else numbers)
        several = power_of_two(rows, at_most=numbers // block)
        found.append(Config({"ROWS": several, "BLOCK": block}, warps=4))
    return tuple(found)
