"""Decoding: how many rows by how many keys a program works on, and how many share one sequence."""

from __future__ import annotations

import torch

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.launching import cdiv

MOST_SPLITS = 128
FEWEST_KEYS = 128  # of one split: fewer are not worth a program of their own


def tiles(
    architecture: Architecture, size: int, rows: int, dtype: torch.dtype
) -> tuple[Config, ...]:
    """Tile ROWS x COLUMNS: queries of all heads that share keys, by keys."""
    row_tile = power_of_two(rows, at_least=16, at_most=32 if size > 128 else 64)
    bytes_of_key = size * dtype.itemsize
    fits = 32 if bytes_of_key > 256 else 64
    if architecture.lanes == 32 and architecture.backend == "hip":
        return (Config({"ROWS": 16, "COLUMNS": 16}, warps=4, stages=1),)
    if architecture.backend == "hip":
        return (Config({"ROWS": row_tile, "COLUMNS": fits // 2}, warps=4, stages=2),)
    return (Config({"ROWS": row_tile, "COLUMNS": fits}, warps=4, stages=3),)


def splits(architecture: Architecture, programs: int, keys: int) -> int:
    """How many programs share the keys of one sequence: enough for two on each unit, a power of
    two. Fixed by shapes, not by the lengths, so that every run adds up in the same order."""
    wanted = cdiv(2 * architecture.units, max(1, programs))
    return power_of_two(min(wanted, cdiv(keys, FEWEST_KEYS)), at_most=MOST_SPLITS)
