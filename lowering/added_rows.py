"""Rows that are added at places of a tensor, by torch's kernel, which sorts the places.

Inductor adds number by number, each addition atomic: 10,000 rows of 128 numbers take eight times as
long as in eager, and their sums depend on which thread came first. Graph networks add so, and the
gradient of `x[places]` is such a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import call, hint, is_known, same_sizes

aten = torch.ops.aten
prims = torch.ops.prims

_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_MANY = 2048  # numbers: with fewer, a call takes longer than they do


def put_right(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        if (places := _places(*node.args)) is not None:
            _replace(graph, node, places)


def _places(
    x: fx.Node, indices: Sequence[Any], values: fx.Node, accumulate: bool = False, *_: Any
) -> fx.Node | None:
    """Of whole rows that are added; None where it is something else, or not worth a call."""
    if not accumulate or len(indices) != 1 or indices[0] is None:
        return None
    places: fx.Node = indices[0]
    whole: Any
    index: Any
    rows: Any
    whole, index, rows = (node.meta.get("val") for node in (x, places, values))
    if not all(isinstance(one, torch.Tensor) for one in (whole, index, rows)):
        return None
    if whole.device.type != "cpu" or index.dim() != 1 or index.dtype not in _INTEGERS:
        return None
    if rows.dtype != whole.dtype or rows.dtype not in _FLOATS:
        return None
    if not same_sizes(rows.shape, (*index.shape, *whole.shape[1:])):
        return None
    many = all(map(is_known, rows.shape)) and torch.Size(map(hint, rows.shape)).numel() >= _MANY
    return places if many else None


def _replace(graph: fx.Graph, node: fx.Node, places: fx.Node) -> None:
    x: Any = node.args[0]
    values: Any = node.args[2]
    shape = values.meta["val"].shape
    with graph.inserting_before(node):
        if places.meta["val"].dtype != torch.int64:
            places = call(graph, prims.convert_element_type.default, places, torch.int64)
        places = _from_the_front(graph, places, x)
        for _ in shape[1:]:
            places = call(graph, aten.unsqueeze.default, places, -1)
        wide = [-1, *_sizes(graph, values)]
        if len(shape) > 1:
            places = call(graph, aten.expand.default, places, wide)
        new = call(graph, aten.scatter_add.default, x, 0, places, values)
    new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _from_the_front(graph: fx.Graph, places: fx.Node, x: fx.Node) -> fx.Node:
    """A place may be counted from the end; torch's kernel takes none of those."""
    (count,) = _sizes(graph, x, slice(0, 1))
    from_end = call(graph, aten.lt.Scalar, places, 0)
    counted = call(graph, aten.add.Tensor, places, count)
    return call(graph, aten.where.self, from_end, counted, places)


def _sizes(graph: fx.Graph, node: fx.Node, which: slice = slice(1, None)) -> list[Any]:
    """Numbers, or nodes for those that change."""
    sizes = list(enumerate(node.meta["val"].shape))[which]
    return [
        size if isinstance(size, int) else call(graph, aten.sym_size.int, node, dim)
        for dim, size in sizes
    ]
