"""The cross-entropy region, alone or with the linear layer whose output nobody else reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.calls import arguments, dtype_name, name_of, value_of

_NAMES = {
    "cross_entropy": (
        "input target weight size_average ignore_index reduce reduction label_smoothing".split()
    ),
    "cross_entropy_loss": "input target weight reduction ignore_index label_smoothing".split(),
}
_DEFAULTS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class CrossEntropy:
    """One call with class numbers as targets: (tokens, classes) against (tokens,)."""

    node: fx.Node
    logits: fx.Node
    target: fx.Node
    weight: Any
    ignore_index: int
    reduction: str
    label_smoothing: float
    absorbed: Sequence[fx.Node] = ()

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.logits).dtype

    def work(self) -> Work:
        logits = value_of(self.logits)
        tokens, classes = (hint(size) for size in logits.shape)
        return Work(
            region="cross_entropy",
            dtypes=frozenset({dtype_name(logits)}),
            op_count=1,
            flops=4 * tokens * classes,
            bytes_moved=tokens * classes * logits.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in logits.shape),
            shape_class="wide" if classes >= 1 << 16 else "narrow",
        )


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The loss of hidden @ weight.t() + bias; `hidden` may have any leading dimensions."""

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: Any
    loss: CrossEntropy
    absorbed: Sequence[fx.Node]

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.hidden).dtype

    def work(self) -> Work:
        hidden, weight = value_of(self.hidden), value_of(self.weight)
        tokens = math.prod(hint(size) for size in hidden.shape[:-1])
        classes = hint(weight.shape[0])
        return Work(
            region="linear_cross_entropy",
            dtypes=frozenset({dtype_name(hidden)}),
            op_count=1,
            flops=2 * tokens * classes * hint(weight.shape[1]),
            bytes_moved=tokens * classes * 4,  # the logits, as the loss wants them
            dynamic=any(not isinstance(size, int) for size in hidden.shape),
        )


def find(graph: fx.Graph) -> Iterator[CrossEntropy]:
    for node in list(graph.nodes):
        names = _NAMES.get(name_of(node))
        if names is None:
            continue
        given = arguments(node, names, _DEFAULTS)
        logits, target = value_of(given["input"]), value_of(given["target"])
        reduction = given["reduction"]
        if isinstance(reduction, int):  # torch's own function numbers them
            reduction = _REDUCTIONS[reduction]
        plain = given.get("size_average") is None and given.get("reduce") is None
        by_number = target is not None and target.dtype is torch.int64 and target.dim() == 1
        if plain and by_number and logits is not None and logits.dim() == 2:
            yield CrossEntropy(
                node,
                given["input"],
                given["target"],
                given["weight"],
                given["ignore_index"],
                reduction,
                given["label_smoothing"],
            )


def find_with_linear(graph: fx.Graph) -> Iterator[LinearCrossEntropy]:
    for loss in find(graph):
        between = list(_only_renamed(loss.logits))
        source: Any = between[-1]
        if name_of(source) != "linear" or len(source.users) != 1 or loss.weight is not None:
            continue
        given = arguments(source, ("input", "weight", "bias"), {})
        values = [value_of(given[name]) for name in ("input", "weight")]
        rows = (
            math.prod(hint(size) for size in values[0].shape[:-1]) if values[0] is not None else 0
        )
        if None not in values and rows == hint(value_of(loss.logits).shape[0]):
            yield LinearCrossEntropy(
                loss.node, given["input"], given["weight"], given["bias"], loss, tuple(between)
            )


def _only_renamed(node: Any) -> Iterator[Any]:
    """The node and those before it that only give its numbers another shape or more digits."""
    yield node
    while name_of(node) in ("view", "reshape", "flatten", "float", "contiguous"):
        if len(node.users) != 1 or not isinstance(node.args[0], fx.Node):
            return
        node = node.args[0]
        yield node
