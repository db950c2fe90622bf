"""Sums over many numbers are made of sums over few, so that they are as exact as eager's.

Where neighbours in memory belong to different sums (a mean over tokens or pixels, the gradient of a
bias), Inductor adds up to 4096 numbers one after another: the error grows with their square root,
to ten times eager's, which adds in a tree. Neighbours that belong to one sum share vectors there,
which is enough of a tree. Where the count is a symbol, torch's own kernel computes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering.graphs import is_known

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

_MANY = 128  # from so many on it counts: 256 already use up what the contract allows
_FEW = 64  # so many may be added one after another
_PART = 32
_TAKEN = (torch.float32, torch.float64)  # shorter ones are rounded by far more in the end


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for target in _OPERATORS:
        for node in graph.find_nodes(op="call_function", target=target):
            x = node.args[0]
            if dims := _across(node, x.meta.get("val"), node.args[1:2]):
                _put_right(graph, node, x, dims)


def _put_right(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]) -> None:
    shape, target = x.meta["val"].shape, node.target
    sizes = [shape[dim] for dim in dims]
    counted = all(isinstance(size, int) for size in sizes)
    if counted and math.prod(sizes) <= _MANY:
        return
    one_symbol = sum(not isinstance(size, int) for size in shape) <= 1
    if counted and one_symbol and not _are_long_lines(shape, dims):
        _divide(graph, node, x, dims)
    elif isinstance(target, torch._ops.OpOverload):
        name = _OPERATORS[target].split("(")[0]
        node.target = getattr(torch.ops.kernel_dispatch, name).default


def _divide(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]) -> None:
    call, shape = _caller(graph), x.meta["val"].shape
    count = math.prod(shape[dim] for dim in dims)
    keeps = bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
    with graph.inserting_before(node):
        if node.target is _VARIANCE:
            given = node.kwargs.get("correction")
            sums = _total_as_it_lies(call, x, dims, True)
            mean = call(aten.div.Tensor, sums, float(count))
            away = call(aten.sub.Tensor, x, mean)
            x = call(aten.mul.Tensor, away, away)
            count -= 1 if given is None else given
        new = _total_as_it_lies(call, x, dims, keeps)
        if node.target is not aten.sum.dim_IntList:
            new = call(aten.div.Tensor, new, float(max(count, 0)))
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _across(node: fx.Node, value: Any, given: Sequence[Any]) -> list[int]:
    """The dimensions that are summed up, if neighbours in memory belong to different sums of
    floats on a CPU; else none."""
    if not isinstance(value, FakeTensor):
        return []
    known = value.device.type == "cpu" and value.dtype in _TAKEN
    dims = given[0] if given else None
    if not known or not dims or not value.dim() or node.meta["val"].dtype != value.dtype:
        return []
    if "dtype" in node.kwargs or not all(map(is_known, value.shape)):
        return []
    found = sorted(dim % value.dim() for dim in dims)
    if _are_pixels(value.shape, found):
        return found  # images may lie channels last by then
    together = any(value.stride(dim) == 1 and value.shape[dim] != 1 for dim in found)
    return [] if together else found


def _are_pixels(shape: Sequence[Any], dims: Sequence[int]) -> bool:
    """All but channels, and batches perhaps."""
    return len(shape) > 3 and 1 not in dims and set(range(2, len(shape))) <= set(dims)


def _are_long_lines(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """They would be cut where Inductor no longer sees that channels lie side by side."""
    return _are_pixels(shape, dims) and any(shape[dim] > _FEW for dim in dims)


Call = Callable[..., fx.Node]


def _caller(graph: fx.Graph) -> Call:
    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        values = fx.node.map_arg(args, lambda one: one.meta["val"])
        with next(one for one in values if isinstance(one, torch.Tensor)).fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*values, **kwargs)
        return node

    return call


def _total_as_it_lies(call: Call, x: fx.Node, dims: Sequence[int], keeps: bool) -> fx.Node:
    """The sum over `dims`, computed with the dimensions in the order in which they lie in memory:
    sums of parts are laid out as they are indexed, and are to lie side by side like the numbers."""
    strides, places = x.meta["val"].stride(), list(range(x.meta["val"].dim()))
    known = all(isinstance(stride, int) for stride in strides)  # symbols are not to be compared
    order = sorted(places, key=strides.__getitem__, reverse=True) if known else places
    if order == places:
        return _total(call, x, dims, keeps)
    places = [order.index(dim) for dim in places]
    turned = call(aten.permute.default, x, order)
    sums = _total(call, turned, [places[dim] for dim in dims], True)
    sums = call(aten.permute.default, sums, places)
    sums = call(aten.clone.default, sums, memory_format=torch.contiguous_format)
    return sums if keeps else call(aten.squeeze.dims, sums, list(dims))


def _total(call: Call, x: fx.Node, dims: Sequence[int], keeps: bool) -> fx.Node:
    """The sum over `dims`, which keep their place until the end."""
    shape = list(x.meta["val"].shape)
    longest = max(dims, key=lambda dim: shape[dim])
    count = shape[longest]
    if math.prod(shape[dim] for dim in dims) <= _FEW:
        return call(aten.sum.dim_IntList, x, list(dims), keeps)
    if count <= _FEW:
        return _total(call, call(aten.sum.dim_IntList, x, [longest], True), dims, keeps)
    if part := _divisor(count):
        parts = [*shape[:longest], count // part, part, *shape[longest + 1 :]]
        known = [size if isinstance(size, int) else -1 for size in parts]
        sums = call(aten.sum.dim_IntList, call(aten.view.default, x, known), [longest + 1], False)
        return _total(call, sums, dims, keeps)
    whole = count // _PART * _PART
    first = call(aten.slice.Tensor, x, longest, 0, whole)
    rest = call(aten.slice.Tensor, x, longest, whole, count)
    return call(aten.add.Tensor, _total(call, first, dims, keeps), _total(call, rest, dims, keeps))


def _divisor(count: int) -> int | None:
    """The one that is nearest to a part's size, not much smaller or larger."""
    found = [size for size in range(_PART // 2, _FEW + 1) if count % size == 0]
    return min(found, key=lambda size: abs(size - _PART), default=None)
