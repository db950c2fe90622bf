"""RMS norm over the last dimension, with what is added before it: one threadgroup for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.metal import shaders
from lowering.metal.registration import operator
from triton_kernels.rows import as_rows

_THREADS = 512  # at most, for one row


def launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(normed, x + residual or nothing)"""
    rows = as_rows(x)
    beside = rows if residual is None else as_rows(residual)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    summed = out if residual is None else torch.empty_like(out)
    factors = rows if weight is None else weight.contiguous()
    count, columns = rows.shape
    threads = min(_THREADS, -(-columns // 32) * 32)
    shaders.library("rms_norm", NUMBER=x.dtype, WEIGHT=factors.dtype).rms_norm(
        rows,
        beside,
        factors,
        out,
        summed,
        columns,
        rows.stride(0),
        beside.stride(0),
        int(residual is not None),
        int(weight is not None),
        eps,
        threads=[threads, count],
        group_size=[threads, 1],
    )
    return _laid_out(out, x), x.new_empty(0) if residual is None else _laid_out(summed, x)


def _laid_out(rows: Tensor, x: Tensor) -> Tensor:
    """In the shape of `x`, and in memory as elementwise operators of torch would lay it."""
    shaped = rows.view(x.shape)
    return shaped if x.is_contiguous() else torch.empty_like(x).copy_(shaped)


def meaning(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """In plain torch."""
    summed = x if residual is None else x + residual
    wide = summed if summed.dtype is torch.float64 else summed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(wide.dtype)
    return normed.to(x.dtype), x.new_empty(0) if residual is None else summed


def fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if residual is None else torch.empty_like(x)


OPERATOR = operator("rms_norm", region="norm", launcher=launch, meaning=meaning, fake=fake)
