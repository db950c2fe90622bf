"""The gated region: silu(gate) * up or gelu(gate) * up, between the two halves of an MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, same_sizes
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class Gated:
    """`node` is the product."""

    node: fx.Node
    gate: fx.Node
    up: fx.Node
    activation: str

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        value = self.node.meta["val"]
        size = math.prod(hint(size) for size in value.shape)
        return Work(
            region="gated",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=8 * size,
            bytes_moved=3 * size * self.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Gated]:
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor:
            continue
        for activated, up in (node.args, node.args[::-1]):
            if not isinstance(activated, fx.Node) or not isinstance(up, fx.Node):
                continue
            name, gate = _activation(_unconverted(activated))
            if gate is not None and _alike(gate, up) and _unconverted(up) is not gate:
                yield Gated(node, gate, up, name)
                break


def _alike(gate: fx.Node, up: fx.Node) -> bool:
    return same_sizes(gate.meta["val"].shape, up.meta["val"].shape)


def _activation(node: Any) -> tuple[str, Any]:
    """The activation's name and its input, whole or as Inductor takes it apart."""
    if not isinstance(node, fx.Node):
        return "", None
    if node.target is aten.silu.default:
        return "silu", node.args[0]
    if node.target is aten.gelu.default:
        return "gelu", node.args[0]
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        for one, other in (node.args, node.args[::-1]):
            if isinstance(one, fx.Node) and isinstance(other, fx.Node):
                if _is_gate(other, one, aten.sigmoid.default, aten.exp.default):
                    return "silu", _unconverted(one)
                if _is_gate(other, _scaled(one), aten.erf.default, aten.tanh.default):
                    return "gelu", _unconverted(_scaled(one))
    return "", None


def _is_gate(node: fx.Node, x: Any, *functions: Any) -> bool:
    """Is it computed from nothing but x and numbers, by one of these functions, in a few steps?"""
    found, steps, waiting = False, 0, [node]
    while waiting and steps < 12:
        step = waiting.pop()
        steps += 1
        if step is x:
            continue
        if step.op != "call_function":
            return False
        found |= step.target in functions
        waiting += step.all_input_nodes
    return found and not waiting


def _scaled(node: Any) -> Any:
    """x, where this is x times a number."""
    is_scaled = node.target is aten.mul.Tensor and not isinstance(node.args[1], fx.Node)
    return node.args[0] if is_scaled else None


def _unconverted(node: Any) -> Any:
    is_cast = (
        isinstance(node, fx.Node) and node.target is torch.ops.prims.convert_element_type.default
    )
    return node.args[0] if is_cast else node
