"""Copies that are read more than once along their rows are written to memory.

Softmax and layer norm begin with a copy that lies as it is indexed, as eager's do. Inductor makes
it anew wherever it is read: where neighbours lay apart they are gathered for each pass, number
by number: a softmax over 196 keys whose heads lay innermost took 3.3 times as long as eager's.
Where many neighbours belong to different rows, rows are computed side by side, which is as fast.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
prims = torch.ops.prims

_MANY = 64

# What reads a row before anything else of it can be computed.
_FIRST_PASSES = {
    aten.amax.default,
    aten.var_mean.correction,
    aten.mean.dim,
    aten.sum.dim_IntList,
}


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        if _makes_rows(copy) and _is_read_twice(copy):
            _write(graph, copy)


def _makes_rows(copy: fx.Node) -> bool:
    (source,) = copy.all_input_nodes
    before, after = source.meta["val"], copy.meta["val"]
    known = (*before.shape, *before.stride(), *after.stride())
    if after.device.type != "cpu" or any(not isinstance(number, int) for number in known):
        return False
    if before.stride() == after.stride() or not after.is_contiguous():
        return False
    return _neighbours(before) < _MANY


def _neighbours(value: torch.Tensor) -> int:
    """How many numbers of its innermost dimension lie side by side."""
    beside = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride == 1]
    return max(beside, default=1)


def _is_read_twice(copy: fx.Node) -> bool:
    return len(copy.users) > 1 and any(user.target in _FIRST_PASSES for user in copy.users)


def _write(graph: fx.Graph, copy: fx.Node) -> None:
    value = copy.meta["val"]
    with graph.inserting_after(copy):
        written = graph.call_function(
            prims.inductor_force_stride_order.default, (copy, list(value.stride()))
        )
    written.meta = {**copy.meta, "val": value}
    copy.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
