"""The batch_norm region: sums for each channel, in the forward and the backward of training.

Inductor takes BatchNorm apart, and what is left of it here are two kinds of sums: mean and variance
over all but the channels, and those of the gradient and of its product with the distances from the
mean. All else goes through the batch number by number, and Inductor fuses it with its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.weights import Stays

aten = torch.ops.aten
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True)
class Moments:
    """Variance and mean of each channel."""

    node: fx.Node
    x: fx.Node

    def work(self) -> Work:
        return _work(self.x)


@dataclass(frozen=True)
class GradientSums:
    """The sum of `grad`, and of `grad` times the distance of `x` from its mean; `node` is the
    second."""

    node: fx.Node
    total: fx.Node
    grad: fx.Node
    x: fx.Node
    mean: fx.Node

    def work(self) -> Work:
        return _work(self.x)


def find(graph: fx.Graph, stays: Stays) -> Iterator[Moments | GradientSums]:
    for node in graph.find_nodes(op="call_function", target=aten.var_mean.correction):
        if _is_uncorrected(node) and _of_channels(node.args[0], node.args[1:2]):
            yield Moments(node, node.args[0])
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if match := _gradient_sums(node):
            yield match


def _is_uncorrected(node: fx.Node) -> bool:
    given: Any = node.kwargs
    return bool(given.get("correction") == 0 and given.get("keepdim"))


def _of_channels(x: Any, dims: Sequence[Any]) -> bool:
    """Are all dimensions but the second summed up? Narrow floats are widened first, in the same
    loop: they would be written as floats for us."""
    value = x.meta["val"]
    if value.dtype is not torch.float32 or value.device.type != "cpu" or x.target in _CASTS:
        return False
    others = [0, *range(2, value.dim())]
    if value.dim() < 2 or not dims:
        return False
    return sorted(dim % value.dim() for dim in dims[0]) == others


def _gradient_sums(node: Any) -> GradientSums | None:
    product = node.args[0]
    if product.target is not aten.mul.Tensor or len(node.args) > 2 or node.kwargs:
        return None
    for grad, away in (product.args, product.args[::-1]):
        if not all(isinstance(one, fx.Node) for one in (grad, away)):
            continue
        if (
            away.target is not aten.sub.Tensor
            or away.kwargs
            or not _of_channels(grad, node.args[1:])
        ):
            continue
        x, mean = away.args
        total = _total_of(grad, node)
        if total is not None and _is_distance(x, mean, grad):
            return GradientSums(node, total, grad, x, mean)
    return None


def _total_of(grad: fx.Node, dot: fx.Node) -> fx.Node | None:
    """The plain sum over the same dimensions, if nobody needs it before the other one."""
    for user in grad.users:
        same = user.target is dot.target and user.args[1:] == dot.args[1:] and not user.kwargs
        if same and user is not dot and all(dot < reader for reader in user.users):
            return user
    return None


def _is_distance(x: Any, mean: Any, grad: fx.Node) -> bool:
    if not isinstance(x, fx.Node) or not isinstance(mean, fx.Node) or x.target in _CASTS:
        return False
    of, number, each = (one.meta["val"] for one in (grad, x, mean))
    one_for_each_channel = [1, of.shape[1], *[1] * (of.dim() - 2)]
    floats = {of.dtype, number.dtype, each.dtype} == {torch.float32}
    return (
        floats and list(number.shape) == list(of.shape) and list(each.shape) == one_for_each_channel
    )


def _work(x: fx.Node) -> Work:
    value = x.meta["val"]
    return Work(
        region="batch_norm",
        dtypes=frozenset({"float32"}),
        op_count=1,
        bytes_moved=math.prod(hint(size) for size in value.shape) * value.dtype.itemsize,
        dynamic=any(not isinstance(size, int) for size in value.shape),
    )
