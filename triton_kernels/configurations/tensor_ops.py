"""Copies: tiles of rows by columns, square where source and target have other neighbours."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two


def tiles(
    architecture: Architecture, rows: int, columns: int, itemsize: int, crossed: bool
) -> tuple[Config, ...]:
    """Tile ROWS x BLOCK. `crossed`: a tile is read along its rows and written along its columns,
    so each side is as long as what memory moves at once: 128 bytes."""
    if crossed:
        edge = max(32, 128 // itemsize)
        return _tile(rows, columns, edge, edge, 4), _tile(rows, columns, 64, 64, 8)
    found = []
    for numbers_per_lane in (16 // itemsize, 32 // itemsize):
        numbers = 4 * architecture.lanes * numbers_per_lane
        block = power_of_two(columns, at_least=16, at_most=numbers)
        found.append(_tile(rows, block, numbers // block, block, 4))
    return tuple(found)


def _tile(rows: int, columns: int, most_rows: int, most_columns: int, warps: int) -> Config:
    several = power_of_two(rows, at_most=most_rows)
    block = power_of_two(columns, at_least=16, at_most=most_columns)
    return Config({"ROWS": several, "BLOCK": block}, warps)
