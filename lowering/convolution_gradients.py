"""Gradients of convolutions in groups, computed with channels last: two to three times as fast.

oneDNN's backward of depthwise kernels larger than 3x3, and of groups of several channels, depends
on how images lie (7x7 on 96 channels of 56x56: 56 ms, channels last 18; one thread of a Xeon with
AVX-512). Generated code hands images over as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_SIZES = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
_library.define(
    f"grouped_convolution_backward(Tensor grad, Tensor x, Tensor weight, {_SIZES}, SymInt groups, "
    "bool[3] mask) -> (Tensor, Tensor, Tensor)",
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
) -> tuple[Tensor, Tensor, Tensor]:
    grad, x = grad.contiguous(memory_format=_LAST), x.contiguous(memory_format=_LAST)
    where = (stride, padding, dilation, False, [0, 0], groups, [mask[0], mask[1], False])
    dx, dweight, _ = aten.convolution_backward(grad, x, weight.contiguous(), None, *where)
    # oneDNN's own sum is one chain: 10 times eager's error over 112x112 pixels.
    dbias = grad.sum((0, 2, 3)) if mask[2] else None
    return (
        _or_nothing(dx, x).contiguous(memory_format=_LAST) if mask[0] else x.new_empty(0),
        _or_nothing(dweight, x).contiguous(),
        _or_nothing(dbias, x),
    )


def _or_nothing(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A result of an operator is a tensor, also one that nobody asked for."""
    return like.new_empty(0) if gradient is None else gradient


def _like(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wanted = rest[-1]
    return (
        torch.empty_like(x, memory_format=_LAST) if wanted[0] else x.new_empty(0),
        weight.new_empty(weight.shape if wanted[1] else 0),
        weight.new_empty(weight.shape[0] if wanted[2] else 0),
    )


_library.impl("grouped_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::grouped_convolution_backward", _like, lib=_library)


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        if not transposed and groups != 1 and _is_faster(x.meta["val"], weight.meta["val"]):
            node.target = torch.ops.kernel_dispatch.grouped_convolution_backward.default
            node.args = (grad, x, weight, stride, padding, dilation, groups, mask)


def _is_faster(image: Tensor, weight: Tensor) -> bool:
    if image.device.type != "cpu" or image.dtype is not torch.float32 or image.dim() != 4:
        return False
    _, inputs, height, width = weight.shape
    return inputs > 1 or height * width > _SMALL
