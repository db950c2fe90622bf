"""What comes out of a graph: computed tensors are cropped, numbers and inputs are the true ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.bucketing.expressions import evaluate, expression, is_number, shape_of
from lowering.bucketing.inputs import Inputs, Sizes
from lowering.bucketing.layout import Dim, is_static
from lowering.bucketing.refused import Refused
from lowering.graphs import hint


class Outputs:
    def __init__(self, module: fx.GraphModule, inputs: Inputs) -> None:
        (end,) = module.graph.find_nodes(op="output")
        self._given: list[Any] = list(end.args[0])
        self._positions = {node: position for position, node in enumerate(inputs.nodes)}
        nodes = [given for given in self._given if isinstance(given, fx.Node)]
        self._computed = list(dict.fromkeys(filter(self._is_computed, nodes)))
        self._dims: dict[fx.Node, tuple[Dim, ...]] = {}
        self._check_memory()

    def _is_computed(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not is_number(value):
            return node not in self._positions and value is not None
        if not isinstance(value, (int, torch.SymInt)):
            raise Refused(f"the number {value} is an output", node)
        return False

    def _check_memory(self) -> None:
        """What shares memory with an input or another output would have to be cropped with it."""
        owners = [_owner(node) for node in self._computed]
        for node, owner in zip(self._computed, owners, strict=True):
            shared = owner in self._positions or owners.count(owner) > 1
            if shared and not _is_fixed(owner):
                raise Refused("an output shares memory with an input or another output", node)

    def computed(self, results: Sequence[Any]) -> list[torch.Tensor]:
        """Of all that the interpreter gives, the tensors that the bucket's graph returns."""
        by_node = dict(zip(self._given, results, strict=True))
        return [by_node[node].tensor for node in self._computed]

    def learn(self, results: Sequence[Any]) -> None:
        """Remember where the valid positions of each output are."""
        by_node = dict(zip(self._given, results, strict=True))
        self._dims = {node: by_node[node].dims for node in self._computed}

    def cropped(
        self, computed: Sequence[Any], args: Sequence[Any], true: Sizes, sizes: Sizes
    ) -> Any:
        tensors = {
            node: _cropped(tensor, self._dims[node], node.meta["val"], true, sizes)
            for node, tensor in zip(self._computed, computed, strict=True)
        }
        results = []
        for given in self._given:
            if not isinstance(given, fx.Node):
                results.append(given)
            elif given in tensors:
                results.append(tensors[given])
            elif is_number(given.meta.get("val")):
                results.append(evaluate(expression(given.meta["val"]), true))
            else:
                results.append(args[self._positions[given]])
        return tuple(results)


def _cropped(
    tensor: torch.Tensor, dims: Sequence[Dim], value: torch.Tensor, true: Sizes, sizes: Sizes
) -> torch.Tensor:
    """The valid positions, laid out as the original result was."""
    shape = [evaluate(size, true) for size in shape_of(value)]
    if all(map(is_static, dims)) or list(tensor.shape) == shape:
        return tensor
    factors = [factor for dim in dims for factor in dim]
    apart = tensor.reshape([evaluate(factor, sizes) for factor in factors])
    valid = apart[tuple(slice(evaluate(factor, true)) for factor in factors)].reshape(shape)
    stride = [hint(one) for one in value.stride()]
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]
    return valid.permute(order).contiguous().permute(back)


def _is_fixed(node: fx.Node) -> bool:
    return all(size.is_Integer for size in shape_of(node.meta["val"]))


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows."""
    while (schema := getattr(node.target, "_schema", None)) is not None and any(
        result.alias_info is not None for result in schema.returns
    ):
        node = node.all_input_nodes[0]
    return node
