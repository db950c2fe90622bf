"""Rolled rows, which torch's kernel copies in two pieces and Inductor number by number.

`roll` is taken apart into indexing while it is traced. Along the innermost dimension the numbers
that Inductor then reads are no neighbours for it: halves take seven times eager's time, truth
values thirty. Along others it copies whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowering import by_torch
from lowering.graphs import call

aten = torch.ops.aten
prims = torch.ops.prims

_ROLL = by_torch.whole(aten.roll.default)
_NO_VECTORS = (torch.bool, torch.uint8, torch.int8, torch.int16)


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        if (how := _rolled(node)) is not None:
            with graph.inserting_before(node):
                new = call(graph, _ROLL, node.args[0], [how[0]], [how[1]])
            new.meta = {**node.meta, "val": new.meta["val"]}
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _rolled(node: fx.Node) -> tuple[int, int] | None:
    """How far, and along which dimension; None for other indices, or where Inductor does well."""
    x: Any = node.args[0]
    given: Any = node.args[1]
    value: Any = x.meta.get("val")
    places = [dim for dim, index in enumerate(given) if index is not None]
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or len(places) != 1:
        return None
    (dim,) = places
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    if value.numel() < by_torch.MANY or (value.stride(dim) != 1 and value.dtype not in _NO_VECTORS):
        return None
    start = _start(given[dim], value.shape[dim])
    return None if start is None else (-start, dim)


def _start(index: fx.Node, size: int) -> int | None:
    """Of places that go round, from there: the remainder of counting on."""
    if index.target is not aten.fmod.Scalar or index.args[1] != size:
        return None
    added: Any = index.args[0]
    if added.target is not aten.add.Tensor or not isinstance(added.args[1], int):
        return None
    counter: Any = added.args[0]
    counts = counter.target is prims.iota.default and counter.args == (size,)
    from_zero = counter.kwargs.get("start") == 0 and counter.kwargs.get("step") == 1
    return added.args[1] if counts and from_zero and added.args[1] >= 0 else None
