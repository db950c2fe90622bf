"""A graph of dynamic sizes as the graph of one set of sizes, for compilers of fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import place

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def with_sizes(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The graph for the sizes of these inputs, and those of the inputs that it still takes.

    Every number in it becomes a constant. The module is changed in place.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    known = _symbols(placeholders, inputs)
    numbers: dict[fx.Node, Any] = {
        node: value
        for node, value in zip(placeholders, inputs, strict=True)
        if not isinstance(value, torch.Tensor)
    }
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), _NUMBERS) and node not in numbers:
            numbers[node] = _value(node.meta["val"], known)
    if numbers:
        _replace(graph, numbers)
        module.recompile()
    return module, [value for value in inputs if isinstance(value, torch.Tensor)]


def demand_known_sizes(module: fx.GraphModule) -> None:
    """Sizes that depend on the values in a tensor cannot be fixed beforehand."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.Tensor, *_NUMBERS)) and free_unbacked_symbols(value):
            at = place(node)
            raise NotImplementedError(
                f"the size of what {node.target} gives depends on the data"
                + (f" ({at})" if at else "")
            )


def symbolic_dimensions(module: fx.GraphModule) -> list[tuple[int, int]]:
    """(input, dimension) of every size of a tensor that is not fixed."""
    return [
        (position, dimension)
        for position, node in enumerate(module.graph.find_nodes(op="placeholder"))
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        for dimension, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt)
    ]


def _symbols(placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[Any, Any]:
    """symbol -> its value: a symbol stands alone as a number or as a size of some input."""
    known: dict[Any, Any] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        for symbolic, actual in _pairs(node.meta.get("val"), value):
            if isinstance(symbolic, _NUMBERS) and symbolic.node.expr.is_symbol:
                known.setdefault(symbolic.node.expr, actual)
    return known


def _pairs(meta: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, torch.Tensor) and isinstance(meta, torch.Tensor):
        yield from zip(meta.shape, value.shape, strict=True)
        yield from zip(meta.stride(), value.stride(), strict=True)
    else:
        yield meta, value


def _value(number: Any, known: dict[Any, Any]) -> Any:
    found = number.node.expr.xreplace(known)
    if getattr(found, "free_symbols", None):
        raise ValueError(f"the size {number} depends on numbers that only the data can tell")
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(number)]
    return kind(found)


def _replace(graph: fx.Graph, numbers: dict[fx.Node, Any]) -> None:
    def constant(node: fx.Node) -> Any:
        return numbers.get(node, node)

    for node in graph.nodes:
        if node not in numbers:
            node.args = fx.node.map_arg(node.args, constant)
            node.kwargs = fx.node.map_arg(node.kwargs, constant)
    for node in reversed([*numbers]):
        graph.erase_node(node)
