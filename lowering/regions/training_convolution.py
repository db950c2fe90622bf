"""The training_convolution region: convolutions of images in a training step, forward and backward.

Their weights are others in every step, so nothing is prepared ahead. With stride 1 the gradient of
the image is a convolution too: of the gradient, by the weight turned around.
"""

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
from lowering.image_layouts import puts_channels_last
from lowering.outputs import lies_channels_last, lies_in_rows
from lowering.regions.convolution import for_each, winograd_pays
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class TrainingConvolution:
    """`node` gives what it computes: the convolution, or its backward's first result."""

    node: fx.Node
    image: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    backward: fx.Node | None = None  # the call that gives the gradient of the weight as well

    @property
    def turns(self) -> bool:
        """Are the weight's inputs the outputs here?"""
        return self.backward is not None

    @property
    def inputs(self) -> int:
        return int(self.weight.meta["val"].shape[0 if self.turns else 1])

    @property
    def outputs(self) -> int:
        return int(self.weight.meta["val"].shape[1 if self.turns else 0])

    @property
    def kernel(self) -> list[int]:
        return list(self.weight.meta["val"].shape[2:])

    @property
    def products(self) -> int:
        """So many are added up to one number."""
        return self.inputs * math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        images, _, *sizes = self.node.meta["val"].shape
        return math.prod(hint(size) for size in (images, *sizes))

    @property
    def winograd_pays(self) -> bool:
        images, _, *sizes = self.node.meta["val"].shape
        return all(step == 1 for step in self.stride) and winograd_pays(
            self.kernel, self.inputs, self.outputs, hint(images), sizes, self.dilation
        )

    def work(self) -> Work:
        return Work(
            region="training_convolution",
            dtypes=frozenset({"float32"}),
            op_count=1,
            flops=2 * self.pixels * self.products * self.outputs,
            dynamic=any(not isinstance(size, int) for size in self.node.meta["val"].shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[TrainingConvolution]:
    """Where images lie channels last: in rows, torch's own sums are as exact as eager's."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    tiled = {node for node in convolutions if (match := _forward(node)) and match.winograd_pays}
    if puts_channels_last(convolutions, tiled):
        for node in convolutions:
            if match := _forward(node):  # read now: what gives its image may have been replaced
                yield match
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if lies_channels_last(node.args[1].meta["val"]) and (match := _of_the_image(node)):
            yield match


def _forward(node: Any) -> TrainingConvolution | None:
    image, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or groups != 1 or not are_images(image, weight, node) or _lies_as_both(image):
        return None
    stride, padding, dilation = (for_each(one, weight) for one in (stride, padding, dilation))
    return TrainingConvolution(node, image, weight, bias, stride, padding, dilation)


def _of_the_image(node: Any) -> TrainingConvolution | None:
    grad, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    made = [user for user in node.users if user.args[1] == 0]
    if transposed or groups != 1 or not mask[0] or len(made) != 1:
        return None
    if made[0].target is not operator.getitem or not are_images(grad, weight, image):
        return None
    if _lies_as_both(grad):
        return None
    strides, paddings, dilations = (for_each(one, weight) for one in (stride, padding, dilation))
    if any(step != 1 for step in strides) or not are_numbers(*paddings, *dilations):
        return None
    sizes = weight.meta["val"].shape[2:]
    around = [
        step * (size - 1) - pad for size, pad, step in zip(sizes, paddings, dilations, strict=True)
    ]
    if min(around) < 0:
        return None
    return TrainingConvolution(made[0], grad, weight, None, strides, around, dilations, node)


def _lies_as_both(image: fx.Node) -> bool:
    """In rows and channels last: of one channel or pixel. Results lie as images do, and eager's
    would lie in rows."""
    value = image.meta["val"]
    return lies_in_rows(value) and lies_channels_last(value)


def are_images(*nodes: fx.Node) -> bool:
    values = [node.meta["val"] for node in nodes]
    return all(
        value.dim() == 4 and value.dtype is torch.float32 and value.device.type == "cpu"
        for value in values
    )


def are_numbers(*sizes: Any) -> bool:
    """Known while compiling, not nodes."""
    return all(isinstance(size, int) for size in sizes)
