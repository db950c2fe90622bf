"""Few rows times a weight in eight bits, with a scale for each of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.metal import shaders
from lowering.metal.registration import operator
from triton_kernels.rows import as_rows

ROWS = 8  # of x that one simdgroup holds; the shader counts on it
_SIMDGROUPS = 4  # of one threadgroup, each with a column of the result


def launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` is int8, (columns, depth), depth a multiple of 4."""
    rows, columns = as_rows(x), weight.shape[0]
    out = torch.empty((rows.shape[0], columns), dtype=x.dtype, device=x.device)
    threads = 32 * _SIMDGROUPS
    shaders.library("int8_matmul", NUMBER=x.dtype).int8_matmul(
        rows,
        weight,
        scale,
        rows if bias is None else bias.contiguous(),
        out,
        rows.shape[0],
        columns,
        rows.shape[1],
        rows.stride(0),
        int(bias is not None),
        threads=[-(-columns // _SIMDGROUPS) * threads, -(-rows.shape[0] // ROWS)],
        group_size=[threads, 1],
    )
    return out.view(*x.shape[:-1], columns)


def meaning(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """In plain torch."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = (x.to(dtype) @ weight.to(dtype).t()) * scale.to(dtype)
    return (out if bias is None else out + bias.to(dtype)).to(x.dtype)


def fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


OPERATOR = operator("int8_matmul", region="linear", launcher=launch, meaning=meaning, fake=fake)
