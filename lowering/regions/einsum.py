"""The einsum region: products of three or more tensors, in the graph as Dynamo captured it.

It is found before AOTAutograd, which takes an einsum apart into products of pairs in whatever
order torch chose. What cannot be proved to be the plain case (sizes that change, are broadcast or
disagree, one dtype in and another out, the form with lists of numbers) is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering.capability import Work

Path = Sequence[tuple[int, int]]  # pairs of positions; each product is put at the end of the list
Labels = frozenset[Hashable]

TARGETS = (torch.einsum, torch.functional.einsum)


@dataclass(frozen=True)
class Einsum:
    """One match; `terms` are the labels of each operand, an ellipsis as one label per dimension."""

    node: fx.Node
    equation: str
    operands: tuple[fx.Node, ...]
    shapes: tuple[tuple[int, ...], ...]
    terms: tuple[Labels, ...]
    output: Labels
    sizes: Mapping[Hashable, int]
    absorbed: tuple[fx.Node, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["example_value"].dtype

    @property
    def unordered(self) -> Path:
        """What torch does where nobody tells it an order."""
        return ((0, 1),) * (len(self.terms) - 1)

    def work(self) -> Work:
        return Work(
            region="einsum",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=self.cost(self.unordered)[0],
        )

    def cost(self, path: Path) -> tuple[int, int]:
        """FLOPs of all products, and elements of the largest tensor between them."""
        left, flops, largest = list(self.terms), 0, 0
        for pair in path:
            two = [left[index] for index in pair]
            left = [term for index, term in enumerate(left) if index not in pair]
            needed = self.output.union(*left)
            one, other = (two[i] & (needed | two[1 - i]) for i in (0, 1))  # else summed before
            kept = (one | other) & needed
            size = self.size(one | other)
            flops += size if kept == one | other else 2 * size
            largest = max(largest, self.size(kept))
            left.append(kept)
        return flops, largest

    def size(self, labels: Collection[Hashable]) -> int:
        return math.prod(self.sizes[label] for label in labels)


def find(graph: fx.Graph) -> Iterator[Einsum]:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in TARGETS and not node.kwargs:
            found = _match(node)
            if found is not None:
                yield found


def _match(node: fx.Node) -> Einsum | None:
    equation: Any
    operands: Any
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) < 3:
        return None
    values = [_value(operand) for operand in (*operands, node)]
    if any(value is None for value in values) or len({value.dtype for value in values}) > 1:
        return None
    shapes = [tuple(value.shape) for value in values]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    parsed = parse(equation, [len(shape) for shape in shapes[:-1]])
    if parsed is None or len(parsed[1]) != len(shapes[-1]):
        return None
    terms, output = parsed
    sizes: dict[Hashable, int] = {}
    for term, shape in zip((*terms, output), shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                return None
    return Einsum(
        node,
        equation,
        tuple(operands),
        tuple(shapes[:-1]),
        tuple(map(frozenset, terms)),
        frozenset(output),
        sizes,
    )


def _value(node: Any) -> Any:
    """The tensor that a node stands for; None for a subclass or a tensor under a transform."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if type(value) is FakeTensor else None


def parse(
    equation: str, dimensions: Sequence[int]
) -> tuple[list[list[Hashable]], list[Hashable]] | None:
    """The labels of each operand and of the output; None where the equation is not understood."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    if len(texts) != len(dimensions):
        return None
    terms = [_labels(text, count) for text, count in zip(texts, dimensions, strict=True)]
    if any(term is None for term in terms):
        return None
    found = [term for term in terms if term is not None]
    hidden = max((_hidden(term) for term in found), key=len)  # the widest ellipsis
    if arrow:
        output = _labels(result, len(result.replace("...", "")) + len(hidden))
    else:
        letters = [label for term in found for label in term if isinstance(label, str)]
        output = [*hidden, *sorted(one for one in set(letters) if letters.count(one) == 1)]
    if output is None or len(set(output)) != len(output):
        return None
    known = {label for term in found for label in term}
    return (found, output) if set(output) <= known else None


def _labels(text: str, dimensions: int) -> list[Hashable] | None:
    """Letters as they are; the dimensions under an ellipsis by their place from the right."""
    before, dots, after = text.partition("...")
    letters = before + after
    covered = dimensions - len(letters)
    if covered < 0 or (covered and not dots) or (letters and not letters.isalpha()):
        return None
    return [*before, *range(-covered, 0), *after]


def _hidden(term: Sequence[Hashable]) -> list[Hashable]:
    return [label for label in term if isinstance(label, int)]
