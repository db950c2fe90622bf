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
    """Tile ROWS x COLUMNS: queries of all heads that share keys, by keys. None for heads so large
    that registers do not hold them."""
    kind = "cuda" if architecture.backend == "cuda" else f"hip, {architecture.lanes} lanes"
    row_tile = power_of_two(rows, at_least=16, at_most=32 if size > 128 else 64)
    if dtype is torch.float32:
        return _of_float32(kind, size)
    if kind == "hip, 32 lanes":
        return () if size > 128 else (_of(16, 16, 1),)
    if kind == "hip, 64 lanes":
        columns = 16 if size > 128 else 32
        return (_of(row_tile, 2 * columns, 2), _of(row_tile, columns, 2))
    columns = 32 if size > 128 else 64
    found = (_of(row_tile, columns, 3),)
    return (*found, _of(16, 2 * columns, 2)) if row_tile == 16 else found


def _of_float32(kind: str, size: int) -> tuple[Config, ...]:
    if kind == "hip, 32 lanes":
        return ()
    if size <= 64:
        return (_of(16, 32, 1),)
    return (_of(16, 16, 1, warps=8 if kind == "cuda" and size > 128 else 4),)


def _of(rows: int, columns: int, stages: int, warps: int = 4) -> Config:
    return Config({"ROWS": rows, "COLUMNS": columns}, warps, stages)


def splits(architecture: Architecture, programs: int, keys: int) -> int:
    """How many programs share the keys of one sequence: enough for two on each unit, a power of
    two. Fixed by shapes, not by the lengths, so that every run adds up in the same order."""
    wanted = cdiv(2 * architecture.units, max(1, programs))
    return power_of_two(min(wanted, cdiv(keys, FEWEST_KEYS)), at_most=MOST_SPLITS)
