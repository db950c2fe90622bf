"""Sums of products: along a padded dimension both sides are filled with zeros."""

from __future__ import annotations

import torch

from lowering.bucketing.bucket import require_prefix, require_static
from lowering.bucketing.call import Call
from lowering.bucketing.expressions import Expr
from lowering.bucketing.layout import Dim, Padded, broadcast, dim_of, is_static
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule


def _contracted(
    call: Call, one: Padded, along: int, other: Padded, across: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if one.dims[along] != other.dims[across]:
        raise Refused("the two sides of a product are padded differently")
    return call.filled(0, one, [along]), call.filled(1, other, [across])


@rule("aten.mm.default", "aten.mv.default", "aten.dot.default")
def product(call: Call) -> Padded:
    one, other = call.tensors()
    left, right = _contracted(call, one, -1, other, 0)
    names = [argument.name for argument in call.target._schema.arguments[:2]]
    result = call.run(**dict(zip(names, (left, right), strict=True)))
    return Padded(result, one.dims[:-1] + other.dims[1:])


@rule("aten.bmm.default")
def batched_product(call: Call) -> Padded:
    one, other = call["self"], call["mat2"]
    left, right = _contracted(call, one, -1, other, -2)
    dims = (_batch(one, other), one.dims[1], other.dims[2])
    return Padded(call.run(self=left, mat2=right), dims)


@rule("aten.addmm.default")
def product_and_sum(call: Call) -> Padded:
    one, other = call["mat1"], call["mat2"]
    left, right = _contracted(call, one, -1, other, 0)
    dims = (one.dims[0], other.dims[1])
    broadcast(call.shape, [call["self"].dims, dims])
    return Padded(call.run(mat1=left, mat2=right), dims)


@rule("aten.baddbmm.default")
def batched_product_and_sum(call: Call) -> Padded:
    one, other = call["batch1"], call["batch2"]
    left, right = _contracted(call, one, -1, other, -2)
    dims = (_batch(one, other), one.dims[1], other.dims[2])
    broadcast(call.shape, [call["self"].dims, dims])
    return Padded(call.run(batch1=left, batch2=right), dims)


def _batch(one: Padded, other: Padded) -> Dim:
    if one.dims[0] != other.dims[0]:
        raise Refused("the two sides of a product are padded differently")
    return one.dims[0]


@rule("aten.convolution.default")
def convolution(call: Call) -> Padded:
    """Zeros behind the end are what its own padding puts there, so each valid result is the same.

    A transposed convolution spreads its input instead, beyond what is cropped at the end.
    """
    x, weight, bias = call["input"], call["weight"], call["bias"]
    space = range(2, len(x.dims))
    channel = len(x.dims) - len(space) - 1
    require_static(x, [channel])
    require_static(weight, range(len(weight.dims)))
    if bias is not None:
        require_static(bias, [0])
    for dim in space:
        require_prefix(x, dim)
    if call["transposed"]:
        require_static(x, space)
    sizes: tuple[Expr, ...] = call.shape
    dims = [x.dims[0], dim_of(sizes[1])]
    dims += [dim_of(sizes[dim]) for dim in space]
    padded = [dim for dim in space if not is_static(x.dims[dim])]
    return Padded(call.run(input=call.filled(0, x, padded)), tuple(dims))
