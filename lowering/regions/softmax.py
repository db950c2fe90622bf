"""The softmax region: exponentials of rows by their sum, and the logarithm of that.

By itself Inductor's loop takes 1.2 to 3 times as long as torch's own kernel: it calls a function
for the exponentials, and divides. With a mask before it, or something behind it that goes number by
number, it wins back more than that, as the rows then need not be written and read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.outputs import is_view
from lowering.regions.weights import Stays

aten = torch.ops.aten
# By libraries, and so is what torch has no code for that Inductor could generate.
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
_SELECTIONS = (aten.topk, aten.sort, aten.multinomial)


@dataclass(frozen=True)
class Softmax:
    """Over the last dimension of `x`, whose rows lie behind each other."""

    node: fx.Node
    x: fx.Node
    logarithm: bool

    def work(self) -> Work:
        value = self.x.meta["val"]
        numbers = math.prod(hint(size) for size in value.shape)
        return Work(
            region="softmax",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=4 * numbers,
            bytes_moved=2 * numbers * value.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Softmax]:
    for exponentials in list(graph.find_nodes(op="call_function", target=aten.exp.default)):
        match = _around(exponentials)
        if match is not None and _is_dense(match.x) and _stands_alone(match):
            yield match


def _around(exponentials: fx.Node) -> Softmax | None:
    distances: Any = exponentials.args[0]
    x = _shifted(distances)
    sums = [user for user in exponentials.users if user.target is aten.sum.dim_IntList]
    if x is None or len(sums) != 1 or not _keeps_last(sums[0]) or len(sums[0].users) != 1:
        return None
    (user,) = sums[0].users
    if user.target is aten.div.Tensor and user.args == (exponentials, sums[0]):
        return Softmax(user, x, False) if len(exponentials.users) == 2 else None
    if user.target is not aten.log.default or len(user.users) != 1 or len(exponentials.users) != 1:
        return None
    (last,) = user.users
    is_last = last.target is aten.sub.Tensor and last.args == (distances, user)
    return Softmax(last, x, True) if is_last and not last.kwargs else None


def _shifted(node: Any) -> fx.Node | None:
    """x, if this is x minus the maximum of its row."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x, greatest = node.args
    is_maximum = (
        isinstance(greatest, fx.Node)
        and greatest.target is aten.amax.default
        and greatest.args[0] is x
    )
    return x if isinstance(x, fx.Node) and is_maximum and _keeps_last(greatest) else None


def _keeps_last(node: Any) -> bool:
    """Along the last dimension, which stays as one of size 1."""
    if len(node.args) != 3 or node.kwargs or node.args[2] is not True:
        return False
    last = node.args[0].meta["val"].dim() - 1
    return list(node.args[1]) in ([-1], [last])


def _is_dense(x: fx.Node) -> bool:
    value = x.meta["val"]
    on_cpu = value.device.type == "cpu" and value.dtype is torch.float32
    return bool(on_cpu and value.dim() > 0 and value.is_contiguous())


def _stands_alone(match: Softmax) -> bool:
    """Does nothing before or behind it go through the rows in generated code?"""
    before = match.x
    while is_view(before):
        before = before.all_input_nodes[0]
    return (before.op == "placeholder" or _is_call(before)) and _all_read_by_calls(match.node)


def _all_read_by_calls(node: fx.Node) -> bool:
    return all(
        _all_read_by_calls(user) if is_view(user) else user.op == "output" or _is_call(user)
        for user in node.users
    )


def _is_call(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    ours = getattr(node.target, "namespace", "") == "kernel_dispatch"
    return ours or packet in _PRODUCTS or packet in _SELECTIONS
