"""What generated code is to write to memory before anything reads it, instead of making it anew.

- Copies into rows that are read more than once, or are long and added up. Softmax and layer norm
  begin with a copy that lies as it is indexed, as eager's do; so does an image with its pixels and
  channels flattened. Inductor makes it wherever it is read: where neighbours lay apart they are
  gathered for each pass, number by number (a softmax over 196 keys whose heads lay innermost took
  3.3 times as long as eager's), and a sum of thousands is one chain. Where many neighbours belong
  to different rows, rows are computed side by side, which is as fast.
- What a kernel of ours reads with its last dimensions merged or split (features of an image).
  Inductor computes it in the kernel's shape, with a division for each number and no vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lowering import outputs, totals
from lowering.gathered import RESHAPES, copies_read_by, gathers, reduced

aten = torch.ops.aten

_SUMS = {aten.mean.dim, aten.sum.dim_IntList, aten.var.correction}
# What reads a row before anything else of it can be computed.
_FIRST_PASSES = {aten.amax.default, aten.var_mean.correction, *_SUMS}


def mark(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for, the last thing before."""
    for target in _FIRST_PASSES:
        for reader in graph.find_nodes(op="call_function", target=target):
            for copy, again in copies_read_by(reader):
                if (again or _is_long_sum(reader)) and gathers(copy, reader):
                    _write(copy)
    for target in RESHAPES:
        for reshaped in graph.find_nodes(op="call_function", target=target):
            source = _computed(reshaped.args[0])
            if source and any(map(_is_kernel, reshaped.users)) and _merges_or_splits(reshaped):
                _write(source)


def _write(node: fx.Node) -> None:
    node.meta["inductor_realize_to_strides"] = True  # Inductor's own mark


def _is_long_sum(reader: fx.Node) -> bool:
    """Is it a part of a long row? What `totals` makes of shorter rows is shorter."""
    shape = reader.all_input_nodes[0].meta["val"].shape
    sizes = [shape[dim] for dim in reduced(reader)]
    known = all(isinstance(size, int) for size in sizes)
    return reader.target in _SUMS and known and math.prod(sizes) >= totals.PART_OF_ROW // 2


def _computed(node: Any) -> fx.Node | None:
    """What a node is, or is a view of, if generated code computes it."""
    while isinstance(node, fx.Node) and outputs.is_view(node):
        node = node.all_input_nodes[0]
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    value = node.meta.get("val")
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return node if on_cpu and not _is_kernel(node) else None


def _merges_or_splits(reshaped: fx.Node) -> bool:
    """Are other numbers in its last dimension than before?"""
    before, after = (node.meta["val"].shape for node in (reshaped.all_input_nodes[0], reshaped))
    return bool(before and after) and not _is_same(before[-1], after[-1])


def _is_same(one: Any, other: Any) -> bool:
    """Without a question about symbols, which would be an assumption from now on."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def _is_kernel(node: fx.Node) -> bool:
    """Is it an operator of ours, which Inductor calls as it stands?"""
    return getattr(node.target, "namespace", None) == "kernel_dispatch"
