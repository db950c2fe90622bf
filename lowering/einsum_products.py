"""An einsum of two tensors as the product of matrices that it is: attention is found in those."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.attention_in_four import method
from lowering.regions.calls import value_of
from lowering.regions.einsum import TARGETS, parse

Labels = Sequence[Hashable]


@dataclass(frozen=True)
class Written:
    """What was put in the place of an einsum."""

    graph: fx.Graph
    target: Any
    args: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]

    def take_back(self) -> None:
        with self.graph.inserting_before(self.nodes[0]):
            einsum = self.graph.call_function(self.target, self.args)
        einsum.meta = dict(self.nodes[-1].meta)
        self.nodes[-1].replace_all_uses_with(einsum)
        for node in reversed(self.nodes):
            self.graph.erase_node(node)


def is_einsum(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in TARGETS and not node.kwargs


def write(graph: fx.Graph, einsum: fx.Node) -> Written | None:
    """Nothing where it is not one product (several labels of rows, a sum over one operand alone) or
    where autocast gives another dtype."""
    equation, *operands = einsum.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    values = [value_of(operand) for operand in operands]
    whole = value_of(einsum)
    if not isinstance(equation, str) or len(values) != 2 or whole is None:
        return None
    if any(value is None or value.dtype != whole.dtype for value in values):
        return None
    parsed = parse(equation, [value.dim() for value in values])
    product = None if parsed is None else _product(*parsed)
    if product is None:
        return None
    made: list[fx.Node] = []
    with graph.inserting_before(einsum):
        left, right = (
            _ordered(graph, operands[at], labels, wanted, made)  # type: ignore[arg-type]
            for at, labels, wanted in product.operands
        )
        new = graph.call_function(torch.matmul, (left, right))
        new.meta["example_value"] = torch.matmul(value_of(left), value_of(right))
        made.append(new)
        _ordered(graph, new, product.result, product.wanted, made)
    made[-1].meta = dict(einsum.meta)
    einsum.replace_all_uses_with(made[-1])
    written = Written(graph, einsum.target, einsum.args, tuple(made))
    graph.erase_node(einsum)
    return written


@dataclass(frozen=True)
class _Product:
    """Which operand comes first, with its labels as they are and as a product wants them."""

    operands: tuple[tuple[int, Labels, Labels], tuple[int, Labels, Labels]]
    result: Labels
    wanted: Labels


def _product(terms: Sequence[Labels], output: Labels) -> _Product | None:
    if any(len(set(term)) != len(term) for term in terms):
        return None
    one, other = map(set, terms)
    batch = [label for label in output if label in one & other]
    summed = (one & other) - set(output)
    rows, columns = ([label for label in term if label not in batch] for term in terms)
    alone = [[label for label in labels if label not in summed] for labels in (rows, columns)]
    if len(summed) != 1 or any(len(labels) != 1 for labels in alone):
        return None
    if set(output) != {*batch, *alone[0], *alone[1]}:
        return None
    first = 0 if list(output).index(alone[0][0]) < list(output).index(alone[1][0]) else 1
    last = 1 - first
    return _Product(
        (
            (first, terms[first], [*batch, *alone[first], *summed]),
            (last, terms[last], [*batch, *summed, *alone[last]]),
        ),
        [*batch, *alone[first], *alone[last]],
        output,
    )


def _ordered(
    graph: fx.Graph, node: fx.Node, labels: Labels, wanted: Labels, made: list[fx.Node]
) -> fx.Node:
    order = [list(labels).index(label) for label in wanted]
    if order == sorted(order):
        return node
    made.append(method(graph, "permute", node, *order))
    return made[-1]
