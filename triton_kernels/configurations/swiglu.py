"""Gated activations: how many numbers a program takes, and in how many rows they lie."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two


def tiles(architecture: Architecture, rows: int, columns: int) -> tuple[Config, ...]:
    """Tile ROWS x BLOCK: one vector of 16 bytes or two for each thread and tensor."""
    return tuple(
        _tile(rows, columns, numbers_per_lane * warps * architecture.lanes, warps)
        for numbers_per_lane, warps in ((8, 4), (16, 4), (8, 8))
    )


def _tile(rows: int, columns: int, numbers: int, warps: int) -> Config:
    block = power_of_two(columns, at_least=16, at_most=numbers)
    return Config({"ROWS": power_of_two(rows, at_most=numbers // block), "BLOCK": block}, warps)
