"""The sum over some dimensions of a tensor, as a graph of sums over few numbers each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import call

aten = torch.ops.aten

FEW = 64  # so many numbers may be added one after another
_PART = 32
# The same for neighbours, of which 16 or 8 are added at once; or one, where a loop has no vectors.
LONG_ROW = 1024
PART_OF_ROW = 512  # or its half, or twice as many
_VECTOR = 16


def total(graph: fx.Graph, x: fx.Node, dims: Sequence[int], keeps: bool, along: bool) -> fx.Node:
    """The sum over `dims`, computed with the dimensions in the order in which they lie in memory:
    sums of parts are laid out as they are indexed, and are to lie side by side like the numbers.
    `along`: neighbours in memory belong to one sum."""
    strides, places = x.meta["val"].stride(), list(range(x.meta["val"].dim()))
    known = all(isinstance(stride, int) for stride in strides)  # symbols are not to be compared
    order = sorted(places, key=strides.__getitem__, reverse=True) if known else places
    in_order = order == places
    turned = x if in_order else call(graph, aten.permute.default, x, order)
    lying = [order.index(dim) for dim in dims]
    row = _row(turned, lying) if along and known else 0
    if row > 1:
        sums = _over_rows(graph, turned, lying, row)
    else:
        sums = _in_parts(graph, turned, lying, len(places) - 1 if along else None)
    if not in_order:
        sums = call(graph, aten.permute.default, sums, [order.index(dim) for dim in places])
        sums = call(graph, aten.clone.default, sums, memory_format=torch.contiguous_format)
    return sums if keeps else call(graph, aten.squeeze.dims, sums, list(dims))


def _row(x: fx.Node, dims: Sequence[int]) -> int:
    """How many of the last dimensions are summed up and lie in memory as one."""
    value, found = x.meta["val"], 0
    for dim in reversed(range(value.dim())):
        size, stride = value.shape[dim], value.stride(dim)
        beside = math.prod(value.shape[dim + 1 :])
        if dim not in dims or not isinstance(size, int) or (size != 1 and stride != beside):
            break
        found += 1
    return found


def _over_rows(graph: fx.Graph, x: fx.Node, dims: Sequence[int], row: int) -> fx.Node:
    """With the last `row` dimensions as one; all of `dims` are kept, with the size 1."""
    shape = list(x.meta["val"].shape)
    outer = shape[: len(shape) - row]
    flat = [*outer, math.prod(shape[len(outer) :])]
    x = call(graph, aten.view.default, x, _known(flat))
    rest = [dim for dim in dims if dim < len(outer)]
    sums = _in_parts(graph, x, [*rest, len(outer)], len(outer))
    kept = [1 if dim in dims else size for dim, size in enumerate(shape)]
    return call(graph, aten.view.default, sums, _known(kept))


def _in_parts(
    graph: fx.Graph, x: fx.Node, dims: Sequence[int], side_by_side: int | None
) -> fx.Node:
    """The sum over `dims`, which are kept with the size 1. Numbers of dimension `side_by_side` are
    neighbours."""
    shape = list(x.meta["val"].shape)
    longest = max(dims, key=lambda dim: shape[dim])
    count, neighbours = shape[longest], longest == side_by_side
    few, size = (LONG_ROW, PART_OF_ROW) if neighbours else (FEW, _PART)
    if math.prod(shape[dim] for dim in dims) <= few:
        return call(graph, aten.sum.dim_IntList, x, list(dims), True)
    if count <= few:
        sums = call(graph, aten.sum.dim_IntList, x, [longest], True)
        return _in_parts(graph, sums, dims, side_by_side)
    if part := divisor(count, size):
        parts = _known([*shape[:longest], count // part, part, *shape[longest + 1 :]])
        sums = call(
            graph,
            aten.sum.dim_IntList,
            call(graph, aten.view.default, x, parts),
            [longest + 1],
            False,
        )
        return _in_parts(graph, sums, dims, side_by_side)
    whole = count // size * size
    first = call(graph, aten.slice.Tensor, x, longest, 0, whole)
    rest = call(graph, aten.slice.Tensor, x, longest, whole, count)
    return call(
        graph,
        aten.add.Tensor,
        *(_in_parts(graph, one, dims, side_by_side) for one in (first, rest)),
    )


def divisor(count: int, size: int) -> int | None:
    """The one that is nearest to a part's size, not much smaller or larger; best in whole vectors,
    where a part is long enough for them."""
    found = [part for part in range(size // 2, 2 * size + 1) if count % part == 0]
    whole = [part for part in found if part % _VECTOR == 0]
    choice = whole if whole and size > _PART else found
    return min(choice, key=lambda part: abs(part - size), default=None)


def _known(shape: Sequence[Any]) -> list[int]:
    """One size may be a symbol."""
    return [size if isinstance(size, int) else -1 for size in shape]
