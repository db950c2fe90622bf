"""The weight_gradient region: gradients of the weights of convolutions without groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.outputs import lies_channels_last
from lowering.regions.convolution import for_each
from lowering.regions.training_convolution import are_images, are_numbers
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class WeightGradient:
    """`node` is the second result of `backward`."""

    node: fx.Node
    backward: fx.Node
    grad: fx.Node
    image: fx.Node
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def inputs(self) -> int:
        return int(self.node.meta["val"].shape[1])

    @property
    def kernel(self) -> list[int]:
        return list(self.node.meta["val"].shape[2:])

    @property
    def pixels(self) -> int:
        """So many products are added up to one number."""
        images, _, *sizes = self.grad.meta["val"].shape
        return math.prod(hint(size) for size in (images, *sizes))

    def work(self) -> Work:
        weight = self.node.meta["val"]
        return Work(
            region="weight_gradient",
            dtypes=frozenset({"float32"}),
            op_count=1,
            flops=2 * self.pixels * weight.numel(),
            dynamic=any(not isinstance(size, int) for size in self.grad.meta["val"].shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[WeightGradient]:
    """Of images that lie channels last."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if lies_channels_last(node.args[1].meta["val"]) and (match := _match(node)):
            yield match


def _match(node: Any) -> WeightGradient | None:
    grad, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    made = [user for user in node.users if user.args[1] == 1]
    if transposed or groups != 1 or not mask[1] or len(made) != 1:
        return None
    if made[0].target is not operator.getitem or not are_images(grad, image, weight):
        return None
    if not are_numbers(*weight.meta["val"].shape):
        return None
    stride, padding, dilation = (for_each(one, weight) for one in (stride, padding, dilation))
    return WeightGradient(made[0], node, grad, image, stride, padding, dilation)
