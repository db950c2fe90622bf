"""Questions about numbers that Inductor asks one by one, as comparisons, which are vectors.

On a CPU a loop that asks `isnan`, or that takes a number for a truth value, takes four to fifteen
times as long as eager's (torch 2.13), whatever else it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    for target in _ANY:
        for node in graph.find_nodes(op="call_function", target=target):
            value = node.meta["val"]
            if value.dtype is torch.uint8 and value.device.type == "cpu":
                with graph.inserting_before(node):
                    _replace(node, _any_of_bytes(graph, node))


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


def _is_not_zero(graph: fx.Graph, x: fx.Node) -> fx.Node:
    if x.meta["val"].dtype is torch.bool:
        return x
    return call(graph, aten.ne.Scalar, x, 0)


def _converted(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    assert dtype is torch.bool, "nothing else asks"
    return _is_not_zero(graph, x)


def _is_zero(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.eq.Scalar, x, 0)


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


def _any_of_bytes(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A byte, as in eager; of Inductor it is a truth value (torch 2.13)."""
    (x,) = node.all_input_nodes
    found = call(graph, node.target, _is_not_zero(graph, x), *node.args[1:], **node.kwargs)
    return call(graph, prims.convert_element_type.default, found, torch.uint8)


def _of_both(target: Any) -> Callable[..., fx.Node]:
    def compare(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        return call(graph, target, _is_not_zero(graph, x), _is_not_zero(graph, y))

    return compare


_OF_FLOATS = (aten.isnan.default, aten.isinf.default)
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
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
