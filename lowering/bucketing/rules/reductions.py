"""Many numbers along some dimensions become one, or each is divided by what all of them give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowering.bucketing.bucket import require_prefix, require_static
from lowering.bucketing.call import Call
from lowering.bucketing.expressions import product
from lowering.bucketing.layout import Dim, Padded, is_static, size_of
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule


def _without(x: Padded, dims: Sequence[int], keep: bool) -> tuple[Dim, ...]:
    if keep:
        return tuple(() if index in dims else dim for index, dim in enumerate(x.dims))
    return tuple(dim for index, dim in enumerate(x.dims) if index not in dims)


def _kept(call: Call) -> bool:
    return bool(call.get("keepdim", False))


@rule(
    "aten.sum.default",
    "aten.sum.dim_IntList",
    "aten.nansum.default",
    "aten.count_nonzero.default",
    "aten.any.default",
    "aten.any.dim",
    "aten.any.dims",
    "aten.all.default",
    "aten.all.dim",
    "aten.all.dims",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.amax.default",
    "aten.amin.default",
    "aten.max.default",
    "aten.min.default",
    "aten.logsumexp.default",
)
def reduced(call: Call) -> Padded:
    dims = call.dims()
    return Padded(call.run(self=call.filled(0, call.x, dims)), _without(call.x, dims, _kept(call)))


@rule("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def reduced_with_position(call: Call) -> Any:
    """The first of equals is taken, and padding comes last: no position of it is ever given."""
    dims = call.dims()
    if call.get("dim") is None:  # the position in the flattened tensor
        require_static(call.x, dims[1:])
    for dim in dims[:1]:
        require_prefix(call.x, dim)
    left = _without(call.x, dims, _kept(call))
    return call.with_dims(call.run(self=call.filled(0, call.x, dims)), left, left)


@rule("aten.linalg_vector_norm.default")
def norm(call: Call) -> Padded:
    if float(call["ord"]) < 0:
        require_static(call.x, call.dims())
    return reduced(call)


@rule("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default")
def normalized(call: Call) -> Padded:
    """A row of padding is computed from what stands there, and is never looked at."""
    return Padded(call.run(self=call.filled(0, call.x, [call.dim()])), call.x.dims)


@rule("aten.mean.default", "aten.mean.dim")
def mean(call: Call) -> Padded:
    dims = call.dims()
    if all(is_static(call.x.dims[dim]) for dim in dims):
        return reduced(call)
    dtype = call.first.dtype
    filled = call.filled(0, call.x, dims).to(_wide(dtype))
    result = filled.sum(dims, keepdim=_kept(call)) / _count(call, dims)
    return Padded(result.to(dtype), _without(call.x, dims, _kept(call)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """As torch accumulates it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _count(call: Call, dims: Sequence[int]) -> Any:
    """How many valid numbers there are along these dimensions."""
    return call.bucket.true(product(size_of(call.x.dims[dim]) for dim in dims))


@rule("aten.var.correction", "aten.std.correction")
def variance(call: Call) -> Padded:
    return _variance_and_mean(call)[0]


@rule("aten.var_mean.correction", "aten.std_mean.correction")
def variance_and_mean(call: Call) -> Any:
    return _variance_and_mean(call)


def _variance_and_mean(call: Call) -> list[Padded]:
    x, dims, dtype = call.x, call.dims(), call.first.dtype
    if x.tensor.is_complex():
        raise Refused("the variance of complex numbers has no rule")
    fill = call.bucket.filled
    wide = Padded(x.tensor.to(_wide(x.tensor.dtype)), x.dims)
    count = torch.as_tensor(_count(call, dims), device=x.tensor.device)
    mean = fill("var", 0, wide, dims).sum(dims, keepdim=True) / count
    centred = fill("var", 1, Padded(wide.tensor - mean, x.dims), dims)
    correction = 1 if call["correction"] is None else call["correction"]
    result = (centred * centred).sum(dims, keepdim=True) / (count - correction).clamp(min=0)
    if call.name.startswith("std"):
        result = result.sqrt()
    keep = _kept(call)
    left = _without(x, dims, keep)
    both = (result, mean) if keep else (result.squeeze(dims), mean.squeeze(dims))
    return [Padded(one.to(dtype), left) for one in both]


@rule(
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.logcumsumexp.default",
    "aten.cummax.default",
    "aten.cummin.default",
)
def accumulated(call: Call) -> Any:
    """Each result is made of what comes before it, and padding comes last."""
    if call.x.dims:
        require_prefix(call.x, call.dim())
    return call.with_dims(call.run(), call.x.dims, call.x.dims)
