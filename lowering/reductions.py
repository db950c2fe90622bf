"""Sums over many numbers are made of sums over few, so that they are as exact as eager's.

Inductor adds up to 4096 numbers one after another: the error grows with their square root, to ten
times eager's, which adds in a tree. Where neighbours in memory belong to different sums (a mean
over tokens or pixels, the gradient of a bias), that is numbers, and parts are short. Where they
belong to one sum (a loss, the norm of a gradient) it is vectors, and only long rows are divided.
Where the count is a symbol, torch's own kernel computes the sum. Equal numbers are not added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering import totals
from lowering.equal_numbers import are_equal
from lowering.gathered import copies_read_by, gathers, reduced
from lowering.graphs import call, hint, is_known

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_VARIANCE = aten.var.correction
_OPERATORS = {
    aten.sum.dim_IntList: "sum(Tensor x, int[1]? dim, bool keepdim=False)",
    aten.mean.dim: "mean(Tensor x, int[1]? dim, bool keepdim=False)",
    _VARIANCE: "var(Tensor x, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False)",
}
for _operator, _schema in _OPERATORS.items():
    _name = _schema.split("(")[0]
    _library.define(f"{_schema} -> Tensor")
    # By another name, Inductor leaves it to torch.
    _library.impl(_name, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_dispatch::{_name}", _operator, lib=_library)
_OVER_ALL = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
_MEANS = (aten.mean.dim, aten.mean.default)

_MANY = 128  # from so many on it counts: 256 already use up what the contract allows
_TAKEN = (torch.float32, torch.float64)  # shorter ones are rounded by far more in the end


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for target in (*_OVER_ALL, *_OPERATORS):
        for node in graph.find_nodes(op="call_function", target=target):
            x = _as_it_is_added(graph, node)
            if dims := summed_dims(node, x.meta.get("val")):
                _put_right(graph, node, x, dims)


def _put_right(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]) -> None:
    value = x.meta["val"]
    sizes = [value.shape[dim] for dim in dims]
    counted = all(isinstance(size, int) for size in sizes)
    if node.target is not _VARIANCE and counted and are_equal(x, set(dims)):
        _multiply(graph, node, x, dims)
        return
    along = are_neighbours(value, dims) and not _gathers_a_short_row(node, sizes)
    if are_few(value, dims, along):
        return
    one_symbol = sum(not isinstance(size, int) for size in value.shape) <= 1
    if counted and one_symbol and not are_long_lines(value.shape, dims):
        _divide(graph, node, x, dims, along)
        return
    if along and not counted and one_symbol and node.target is not _VARIANCE:
        left = _sum_up_what_is_counted(graph, node, x, dims)
        if math.prod(hint(value.shape[dim]) for dim in left) <= _MANY:
            return
    _leave_to_torch(node)


def are_few(value: torch.Tensor, dims: Sequence[int], along: bool) -> bool:
    sizes = [value.shape[dim] for dim in dims]
    if along:
        return math.prod(map(hint, sizes)) <= totals.LONG_ROW
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _MANY


def _sum_up_what_is_counted(
    graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]
) -> list[int]:
    """A loss over a batch of any size is a sum over few numbers then. What is left of `dims`."""
    value = x.meta["val"]
    counted = [dim for dim in dims if isinstance(value.shape[dim], int)]
    count = math.prod(value.shape[dim] for dim in counted)
    if count < totals.FEW:
        return dims
    with graph.inserting_before(node):
        sums = totals.total(graph, x, counted, True, are_neighbours(value, counted))
        if node.target in _MEANS:
            sums = call(graph, aten.div.Tensor, sums, float(count))
    node.replace_input_with(x, sums)
    return [dim for dim in dims if dim not in counted]


def _leave_to_torch(node: fx.Node) -> None:
    target: Any = node.target
    if target in _OVER_ALL:
        target, node.args = _OVER_ALL[target], (*node.args, None)
    name = _OPERATORS[target].split("(")[0]
    node.target = getattr(torch.ops.kernel_dispatch, name).default
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "dtype"}


def _divide(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int], along: bool) -> None:
    shape = x.meta["val"].shape
    count = math.prod(shape[dim] for dim in dims)
    keeps = bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
    with graph.inserting_before(node):
        if node.target is _VARIANCE:
            given = node.kwargs.get("correction")
            x = _off_the_first(graph, x, dims)
            sums = totals.total(graph, x, dims, True, along)
            mean = call(graph, aten.div.Tensor, sums, float(count))
            away = call(graph, aten.sub.Tensor, x, mean)
            x = call(graph, aten.mul.Tensor, away, away)
            count -= 1 if given is None else given
        new = totals.total(graph, x, dims, keeps, along)
        if node.target is _VARIANCE or node.target in _MEANS:
            new = call(graph, aten.div.Tensor, new, float(max(count, 0)))
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _multiply(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]) -> None:
    """All are equal: one of them, times their count."""
    count = math.prod(x.meta["val"].shape[dim] for dim in dims)
    keeps = bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
    with graph.inserting_before(node):
        new = _first(graph, x, dims)
        if node.target not in _MEANS:
            new = call(graph, aten.mul.Tensor, new, float(count))
        # A slice lies as all of them would; what is added up lies in rows.
        new = call(graph, aten.clone.default, new, memory_format=torch.contiguous_format)
        if not keeps:
            new = call(graph, aten.squeeze.dims, new, list(dims))
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _first(graph: fx.Graph, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    for dim in dims:
        x = call(graph, aten.slice.Tensor, x, dim, 0, 1)
    return x


def _off_the_first(graph: fx.Graph, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """Equal numbers vary by nothing at all then, and large ones have a mean."""
    return call(graph, aten.sub.Tensor, x, _first(graph, x, dims))


def _as_it_is_added(graph: fx.Graph, node: fx.Node) -> Any:
    """`dtype=` says of what kind: integers, or halves, as float32."""
    x: Any = node.args[0]
    given, wanted = x.meta.get("val"), node.meta.get("val")
    if not isinstance(given, FakeTensor) or not isinstance(wanted, torch.Tensor):
        return x
    if given.dtype == wanted.dtype or wanted.dtype not in _TAKEN or given.is_complex():
        return x
    if given.device.type != "cpu":
        return x
    with graph.inserting_before(node):
        new = call(graph, torch.ops.prims.convert_element_type.default, x, wanted.dtype)
    node.replace_input_with(x, new)
    return new


def summed_dims(node: fx.Node, value: Any) -> list[int]:
    """The dimensions that are summed up, if it is floats on a CPU; else none."""
    if not isinstance(value, FakeTensor) or not value.dim():
        return []
    known = value.device.type == "cpu" and value.dtype in _TAKEN
    result = node.meta["val"]
    result = result[0] if isinstance(result, (tuple, list)) else result
    if not known or result.dtype != value.dtype or not all(map(is_known, value.shape)):
        return []
    return sorted(reduced(node))


def are_neighbours(value: torch.Tensor, dims: Sequence[int]) -> bool:
    """Do numbers that lie side by side belong to one sum?"""
    if _are_pixels(value.shape, dims):
        return False  # images may lie channels last by then
    return any(value.stride(dim) == 1 and value.shape[dim] != 1 for dim in dims)


def _gathers_a_short_row(node: fx.Node, sizes: Sequence[Any]) -> bool:
    """In its own loop: what others read as well, or long rows, are written first."""
    if math.prod(map(hint, sizes)) > totals.LONG_ROW:
        return False
    return any(not again and gathers(copy, node) for copy, again in copies_read_by(node))


def _are_pixels(shape: Sequence[Any], dims: Sequence[int]) -> bool:
    """All but channels, of which there are several, and batches perhaps."""
    if len(shape) < 4 or hint(shape[1]) == 1:
        return False
    return 1 not in dims and set(range(2, len(shape))) <= set(dims)


def are_long_lines(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """They would be cut where Inductor no longer sees that channels lie side by side."""
    return _are_pixels(shape, dims) and any(shape[dim] > totals.FEW for dim in dims)
