"""Attention: how many queries by how many keys a program works on at a time."""

from __future__ import annotations

import torch

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config


def forward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype
) -> tuple[Config, ...]:
    """Tile ROWS x COLUMNS of queries by keys; `size` is the larger of the two head sizes."""
    return (Config({"ROWS": 64, "COLUMNS": 64}, warps=4, stages=2),)


def query_backward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype
) -> tuple[Config, ...]:
    return (Config({"ROWS": 64, "COLUMNS": 32}, warps=4, stages=2),)


def key_backward(
    architecture: Architecture, size: int, queries: int, dtype: torch.dtype
) -> tuple[Config, ...]:
    return (Config({"ROWS": 32, "COLUMNS": 64}, warps=4, stages=2),)
