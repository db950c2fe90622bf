"""Tensors made of nothing but sizes and numbers."""

from __future__ import annotations

from typing import Any

import torch

from lowering.bucketing.bucket import require_prefix
from lowering.bucketing.call import Call, Known
from lowering.bucketing.layout import Padded, dim_of, dims_of
from lowering.bucketing.rules.table import rule

_CONSTANTS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


@rule(
    "aten.full.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.empty.memory_format",
    "aten.new_full.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_empty.default",
    "aten.scalar_tensor.default",
    "aten.full_like.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.empty_like.default",
    "aten.zero.default",
)
def filled_with_one_number(call: Call) -> Padded:
    like = next(call.tensors(), None)
    has_its_form = call.name.endswith("_like") or call.name == "zero"
    dims = like.dims if like is not None and has_its_form else dims_of(call.first)
    number = call.get("fill_value", call.get("s", _CONSTANTS.get(call.name, 0)))
    if isinstance(number, Known):
        number = call.bucket.true(number.expr)
    shape, first = call.bucket.shape(call.shape), call.first
    if not isinstance(number, torch.Tensor):
        return Padded(torch.full(shape, number, dtype=first.dtype, device=first.device), dims)
    return Padded(number.to(first.dtype).expand(shape).clone(), dims)


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "prims.iota.default")
def counted(call: Call) -> Padded:
    start = _number(call, "start", 0)
    step = _number(call, "step", 1)
    first = call.first
    (size,) = call.shape
    numbers = torch.arange(call.bucket.size(size), device=first.device)
    exact = not first.dtype.is_floating_point
    numbers = numbers if exact else numbers.to(torch.float64)
    return Padded((numbers * step + start).to(first.dtype), (dim_of(size),))


def _number(call: Call, name: str, default: int) -> Any:
    if name not in call.arguments:
        return default
    number = call.bucket.true(call.expr(name))
    return number.to(call.first.device) if isinstance(number, torch.Tensor) else number


@rule("aten.eye.default", "aten.eye.m")
def identity(call: Call) -> Padded:
    rows, columns = (
        torch.arange(call.bucket.size(size), device=call.first.device) for size in call.shape
    )
    return Padded((rows[:, None] == columns).to(call.first.dtype), dims_of(call.first))


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Padded:
    """Positions are what they were, as long as padding only follows them."""
    for dim in (-2, -1):
        require_prefix(call.x, dim)
    return Padded(call.run(), call.x.dims)
