"""Gradients of weights that oneDNN computes beyond its own memory.

Of 1x1 kernels with a stride over fewer channels than it has lanes, with channels last, it writes
past its workspace: processes die, or whatever lies behind is changed (uxlfoundation/oneDNN 6035;
torch 2.13 on a Xeon with AVX-512). Generated code lays images channels last by itself, so RepVGG,
MobileOne and FastViT could be trained in eager, and died compiled. The pixels that such a kernel
reads are an image of their own, which needs no stride.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowering.graphs import call

aten = torch.ops.aten

_LANES = 16  # of 32 bits in the widest vectors there are
_END = 2**63 - 1


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if _overruns(node):
            with graph.inserting_before(node):
                _put_right(graph, node)


def _overruns(node: fx.Node) -> bool:
    args: Any = node.args
    _, x, weight, _, stride, padding, _, transposed, _, groups, mask = args
    image, kernel = x.meta["val"], weight.meta["val"]
    if not mask[1] or transposed or groups != 1 or any(padding) or not any(s > 1 for s in stride):
        return False
    if image.device.type != "cpu" or image.dtype is not torch.float32 or image.dim() != 4:
        return False
    return tuple(kernel.shape[2:]) == (1, 1) and bool(kernel.shape[1] < _LANES)


def _put_right(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    grad, x, weight, bias, stride, *rest, mask = args
    read = x
    for dim, step in enumerate(stride, start=2):
        read = call(graph, aten.slice.Tensor, read, dim, 0, _END, step)
    ones = [1] * len(stride)
    of_weights = call(
        graph, node.target, grad, read, weight, bias, ones, *rest, [False, mask[1], mask[2]]
    )
    if not mask[0]:
        node.replace_all_uses_with(of_weights)
        graph.erase_node(node)
        return
    node.args = (grad, x, weight, bias, stride, *rest, [True, False, False])
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] != 0:
            user.replace_input_with(node, of_weights)
