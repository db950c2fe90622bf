"""Tensors as matrices of rows, for kernels that work along the last dimension."""

from __future__ import annotations

import math

import torch


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, columns) with columns side by side; a view where the strides allow one, else a copy.

    Rows may overlap (an expanded tensor): for reading only.
    """
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def alike(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous tensor of the same sizes."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
