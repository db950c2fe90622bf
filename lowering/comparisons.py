"""Questions about numbers that Inductor asks one by one, in a form that is vectors.

On a CPU a loop that asks `isnan`, or that takes a number for a truth value, takes four to fifteen
times as long as eager's (torch 2.13), whatever else it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import call

aten = torch.ops.aten
prims = torch.ops.prims


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for target, compare in _COMPARISONS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if _asks_numbers(node):
                with graph.inserting_before(node):
                    _replace(node, compare(graph, *node.args[:2]))
    for target in _COMPARED:
        for node in graph.find_nodes(op="call_function", target=target):
            if _compares_bytes(node):
                with graph.inserting_before(node):
                    _replace(node, call(graph, target, *_as_floats(graph, node.args)))
    for target, find in _SEARCHES.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if _searches_numbers(node):
                with graph.inserting_before(node):
                    _replace(node, find(graph, node))


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _asks_numbers(node: fx.Node) -> bool:
    """Real ones on a CPU, with truth values as what comes of it."""
    value: Any = node.meta.get("val")
    asked: list[Any] = [one.meta.get("val") for one in node.all_input_nodes]
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in asked)
        and not any(one.is_complex() for one in asked)
        and any(one.dtype is not torch.bool for one in asked)
        and (node.target not in _OF_FLOATS or asked[0].is_floating_point())
    )


def _compares_bytes(node: fx.Node) -> bool:
    """With each other, or with a number that one may be."""
    asked: list[Any] = [one.meta.get("val") for one in node.all_input_nodes]
    return all(
        isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.dtype in _BYTES
        for one in asked
    ) and all(
        isinstance(arg, fx.Node) or (isinstance(arg, int) and 0 <= arg <= 127) for arg in node.args
    )


def _as_floats(graph: fx.Graph, args: Sequence[Any]) -> list[Any]:
    """Which hold bytes exactly. Of bytes themselves Inductor's vectors compare none."""
    return [
        call(graph, prims.convert_element_type.default, arg, torch.float32)
        if isinstance(arg, fx.Node) and arg.meta["val"].dtype in _BYTES
        else arg
        for arg in args
    ]


def _is_not_zero(graph: fx.Graph, x: fx.Node) -> fx.Node:
    if x.meta["val"].dtype is torch.bool:
        return x
    return call(graph, aten.ne.Scalar, *_as_floats(graph, (x,)), 0)


def _converted(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    assert dtype is torch.bool, "nothing else asks"
    return _is_not_zero(graph, x)


def _is_zero(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.eq.Scalar, *_as_floats(graph, (x,)), 0)


def _is_nan(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.ne.Tensor, x, x)


def _is_infinite(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.eq.Scalar, call(graph, aten.abs.default, x), math.inf)


def _has_sign(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Of zeros and of what is no number too."""
    value = x.meta["val"]
    if not value.is_floating_point():
        return call(graph, aten.lt.Scalar, x, 0)
    one = call(graph, aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    return call(graph, aten.lt.Scalar, call(graph, aten.copysign.Tensor, one, x), 0)


def _searches_numbers(node: fx.Node) -> bool:
    (x,) = node.all_input_nodes
    value: Any = x.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if node.target in _ANY:
        return value.dtype is not torch.bool and not value.is_complex()
    return value.dtype in _BYTES


def _any(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Of bytes a byte, as in eager; of Inductor it is a truth value (torch 2.13)."""
    (x,) = node.all_input_nodes
    found = call(graph, node.target, _is_not_zero(graph, x), *node.args[1:], **node.kwargs)
    if x.meta["val"].dtype is not torch.uint8:
        return found
    return call(graph, prims.convert_element_type.default, found, torch.uint8)


def _among_floats(graph: fx.Graph, node: fx.Node) -> fx.Node:
    found = call(graph, node.target, *_as_floats(graph, node.args), **node.kwargs)
    dtype = node.meta["val"].dtype
    if found.meta["val"].dtype is dtype:  # a place
        return found
    return call(graph, prims.convert_element_type.default, found, dtype)


def _of_both(target: Any) -> Callable[..., fx.Node]:
    def compare(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        return call(graph, target, _is_not_zero(graph, x), _is_not_zero(graph, y))

    return compare


_BYTES = (torch.uint8, torch.int8)
_COMPARED = tuple(
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
)
_OF_FLOATS = (aten.isnan.default, aten.isinf.default)
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_SEARCHES: Mapping[Any, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    **dict.fromkeys(_ANY, _any),
    aten.amax.default: _among_floats,
    aten.amin.default: _among_floats,
    aten.argmax.default: _among_floats,
    aten.argmin.default: _among_floats,
}
_COMPARISONS: Mapping[Any, Callable[..., fx.Node]] = {
    aten.isnan.default: _is_nan,
    aten.isinf.default: _is_infinite,
    aten.signbit.default: _has_sign,
    aten.logical_not.default: _is_zero,
    aten.logical_and.default: _of_both(aten.bitwise_and.Tensor),
    aten.logical_or.default: _of_both(aten.bitwise_or.Tensor),
    aten.logical_xor.default: _of_both(aten.bitwise_xor.Tensor),
    prims.convert_element_type.default: _converted,
}
