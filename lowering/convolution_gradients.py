"""Gradients of convolutions that oneDNN computes slowly, or in long sums.

In groups they take half to a third of the time with channels last: oneDNN's backward of depthwise
kernels larger than 3x3, and of groups of several channels, depends on how images lie (7x7 on 96
channels of 56x56: 56 ms, channels last 18; one thread of a Xeon with AVX-512). Generated code hands
images over as it likes. 1x1 kernels with few channels are summed up in parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowering import totals
from lowering.graphs import call
from lowering.outputs import lies_channels_last

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_SIZES = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
_library.define(
    f"grouped_convolution_backward(Tensor grad, Tensor x, Tensor weight, {_SIZES}, SymInt groups, "
    "bool[2] mask) -> (Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)
_LAST = torch.channels_last
_SMALL = 9  # taps of a depthwise kernel, up to which the copies cost what is gained


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(memory_format=_LAST), x.contiguous(memory_format=_LAST)
    where = (stride, padding, dilation, False, [0, 0], groups, [*mask, False])
    dx, dweight, _ = aten.convolution_backward(grad, x, weight.contiguous(), None, *where)
    return (
        _or_nothing(dx, x).contiguous(memory_format=_LAST) if mask[0] else x.new_empty(0),
        _or_nothing(dweight, x).contiguous(),
    )


def _or_nothing(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A result of an operator is a tensor, also one that nobody asked for."""
    return like.new_empty(0) if gradient is None else gradient


def _like(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wanted = rest[-1]
    return (
        torch.empty_like(x, memory_format=_LAST) if wanted[0] else x.new_empty(0),
        weight.new_empty(weight.shape if wanted[1] else 0),
    )


_library.impl("grouped_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::grouped_convolution_backward", _like, lib=_library)


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        for user in [user for user in node.users if not user.users]:
            graph.erase_node(user)
        _sum_up_bias(graph, node)
        if not node.users:
            graph.erase_node(node)
            continue
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        if transposed:
            continue
        if groups != 1:
            if _is_faster(x.meta["val"], weight.meta["val"]):
                node.target = torch.ops.kernel_dispatch.grouped_convolution_backward.default
                node.args = (grad, x, weight, stride, padding, dilation, groups, mask[:2])
        elif mask[1] and all(step == 1 for step in stride) and not any(padding):
            _sum_in_parts(graph, node)


def _is_faster(image: Tensor, weight: Tensor) -> bool:
    if not _is_image(image):
        return False
    _, inputs, height, width = weight.shape
    return inputs > 1 or height * width > _SMALL


def _is_image(value: Tensor) -> bool:
    return value.device.type == "cpu" and value.dtype is torch.float32 and value.dim() == 4


def _sum_up_bias(graph: fx.Graph, node: Any) -> None:
    """oneDNN's sum over all pixels is one chain, with up to 4 times eager's error. Inductor's is in
    parts (`reductions`)."""
    grad, mask = node.args[0], node.args[-1]
    value, made = grad.meta["val"], [user for user in node.users if user.args[1] == 2]
    if not mask[2] or value.device.type != "cpu" or value.dtype is not torch.float32 or not made:
        return
    with graph.inserting_before(node):
        new = call(graph, aten.sum.dim_IntList, grad, [0, *range(2, value.dim())], False)
    node.args = (*node.args[:-1], [*mask[:2], False])
    for user in made:
        user.replace_all_uses_with(new)
        graph.erase_node(user)


# Of 1x1 kernels with fewer channels, the libraries sum up all pixels in a chain where they lie
# channels last: 9 times eager's error with 3 outputs and 18432 pixels, 6 times with 8 inputs.
_INPUTS_IN_PARTS, _OUTPUTS_IN_PARTS = 16, 4
_PIXELS_IN_PART = 256


def _sum_in_parts(graph: fx.Graph, node: Any) -> None:
    """The gradient of such a weight as a sum of products of few pixels each."""
    grad, x, weight, *_ = node.args
    image, (outputs, inputs, *kernel) = x.meta["val"], weight.meta["val"].shape
    few = inputs < _INPUTS_IN_PARTS or outputs < _OUTPUTS_IN_PARTS
    if kernel != [1, 1] or not few or not _is_image(image) or not lies_channels_last(image):
        return
    pixels = math.prod((image.shape[0], *image.shape[2:]))
    part = totals.divisor(pixels, _PIXELS_IN_PART) if isinstance(pixels, int) else None
    made = [user for user in node.users if user.args[1] == 1]
    if part is None or pixels <= 2 * part or len(made) != 1:
        return
    with graph.inserting_before(node):
        left, right = (
            call(
                graph,
                aten.reshape.default,
                call(graph, aten.permute.default, one, [0, 2, 3, 1]),
                [pixels // part, part, channels],
            )
            for one, channels in ((grad, outputs), (x, inputs))
        )
        turned = call(graph, aten.permute.default, left, [0, 2, 1])
        products = call(graph, aten.bmm.default, turned, right)
        sums = call(graph, aten.sum.dim_IntList, products, [0], False)
        new = call(graph, aten.view.default, sums, [outputs, inputs, 1, 1])
    node.args = (*node.args[:-1], [node.args[-1][0], False, node.args[-1][2]])
    made[0].replace_all_uses_with(new)
    graph.erase_node(made[0])
    if not node.users:
        graph.erase_node(node)
