"""Truth values enter and leave generated code as bytes, which vectors can be made of.

On x86 Inductor reads and writes a tensor of them number by number (torch 2.13): a comparison whose
result is stored takes twenty times as long as eager's, and so does every mask that a training
graph keeps for its backward. Bytes are read and written whole; to take one for the other is to copy
them.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from lowering import machine, outputs
from lowering.graphs import call, hint

aten = torch.ops.aten
prims = torch.ops.prims

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("bitcast(Tensor x, ScalarType dtype) -> Tensor")


def _bitcast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy: what a graph's operator returns may not be the memory that it was given."""
    return x.view(dtype).clone()


_library.impl("bitcast", _bitcast, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernel_dispatch::bitcast", lambda x, dtype: torch.empty_like(x, dtype=dtype), lib=_library
)

# A copy of bytes costs a call, some 5 us: so many truth values cost more (13 ns written, 4 read).
_MANY_WRITTEN = 1 << 11
_MANY_READ = 1 << 12
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_REDUCTIONS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.any.dim})


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for."""
    if "avx2" not in machine.cpu().isa:
        return
    for node in list(graph.nodes):
        if not _holds_truth(node):
            continue
        if node.op == "placeholder":
            _read_as_bytes(graph, node)
        elif outputs.is_pointwise(node):
            _write_as_bytes(graph, node)


def _holds_truth(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype is torch.bool and value.device.type == "cpu"


def _read_as_bytes(graph: fx.Graph, mask: fx.Node) -> None:
    readers = [user for user in mask.users if _ends_in_generated(user)]
    if not readers or max(map(_most_read, readers)) < _MANY_READ:
        return
    with graph.inserting_before(_body_of(graph)):
        bits = call(graph, torch.ops.kernel_dispatch.bitcast.default, mask, torch.uint8)
        number = call(graph, prims.convert_element_type.default, bits, torch.float32)
        again = call(graph, aten.ne.Scalar, number, 0)
    for reader in readers:
        reader.replace_input_with(mask, again)


def _write_as_bytes(graph: fx.Graph, mask: fx.Node) -> None:
    """Where somebody reads it who is not generated."""
    readers = [user for user in mask.users if _is_outside(user)]
    if not readers or _size(mask) < _MANY_WRITTEN:
        return
    with graph.inserting_after(mask):
        number = call(graph, prims.convert_element_type.default, mask, torch.float32)
    with graph.inserting_after(number):
        bits = call(graph, prims.convert_element_type.default, number, torch.uint8)
    with graph.inserting_after(bits):
        stored = call(graph, torch.ops.kernel_dispatch.bitcast.default, bits, torch.bool)
    for reader in readers:
        reader.replace_input_with(mask, stored)


def _is_outside(node: fx.Node) -> bool:
    return node.op == "output" or getattr(node.target, "namespace", "") == "kernel_dispatch"


def _ends_in_generated(reader: fx.Node) -> bool:
    """Does all that is made of it by views end there?"""
    if reader.target in _VIEWS:
        return bool(reader.users) and all(map(_ends_in_generated, reader.users))
    return outputs.is_pointwise(reader) or reader.target in _REDUCTIONS


def _most_read(reader: fx.Node) -> int:
    """How many truth values are read there: a small mask may stand for many."""
    if reader.target in _VIEWS:
        return max(map(_most_read, reader.users))
    return _size(reader)


def _size(node: fx.Node) -> int:
    return math.prod(hint(size) for size in node.meta["val"].shape)


def _body_of(graph: fx.Graph) -> fx.Node:
    """The first node behind the inputs."""
    return next(node for node in graph.nodes if node.op != "placeholder")
