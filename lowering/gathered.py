"""Rows that generated code would gather number by number, since they lie otherwise in memory.

A softmax over heads that lie innermost, or over an image's pixels and channels, begins with a copy
that lies as it is indexed; Inductor makes it in the loop that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowering import outputs

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# A reshape is one where it cannot be a view.
_COPIES = (aten.clone.default, aten.reshape.default)
_MANY = 64  # neighbours that belong to as many rows: these are computed side by side


def copies_read_by(reader: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """The copies that Inductor would make in the loop of `reader`, and whether it makes them, or
    what it computes of them, for somebody else as well."""
    found: dict[fx.Node, bool] = {}
    waiting = [(reader.all_input_nodes[0], False)]
    while waiting:
        node, again = waiting.pop()
        again = again or len(node.users) > 1
        if node in found and (found[node] or not again):
            continue
        found[node] = again
        if node.target in _COPIES:
            yield node, again
        if node.target is aten.clone.default:
            continue
        if outputs.is_pointwise(node) or outputs.is_view(node) or node.target in RESHAPES:
            waiting += [(source, again) for source in node.all_input_nodes]


def reduced(reader: fx.Node) -> list[int]:
    """The dimensions over which it reads a row."""
    count = reader.all_input_nodes[0].meta["val"].dim()
    given: Any = reader.args[1] if len(reader.args) > 1 else None
    return [dim % count for dim in given or range(count)] if count else []


def gathers(copy: fx.Node, reader: fx.Node) -> bool:
    """Do the rows of `reader` lie apart before the copy?"""
    before, after = (node.meta.get("val") for node in (copy.all_input_nodes[0], copy))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    known = (*before.shape, *before.stride(), *after.stride())
    if after.device.type != "cpu" or any(not isinstance(number, int) for number in known):
        return False
    if before.is_contiguous() or not after.is_contiguous():
        return False
    beside = [dim for dim in range(before.dim()) if before.stride(dim) == 1]
    dim = max(beside, key=before.shape.__getitem__, default=None)
    if dim is None or before.shape[dim] < _MANY:
        return True
    return not _is_across(reader, before.shape[dim], math.prod(before.shape[dim + 1 :]))


def _is_across(reader: fx.Node, size: int, stride: int) -> bool:
    """Is it a dimension of its own for `reader` too, and each of its numbers in another row?"""
    value, dims = reader.all_input_nodes[0].meta["val"], reduced(reader)
    kept = [dim for dim in range(value.dim()) if dim not in dims]
    known = [dim for dim in kept if isinstance(value.shape[dim], int)]
    return any(value.shape[dim] == size and value.stride(dim) == stride for dim in known)
