"""What generated code is to write to memory before anything reads it, instead of making it anew.

- Copies into rows that are read more than once, or are long and added up. Softmax and layer norm
  begin with a copy that lies as it is indexed, as eager's do; so does an image with its pixels and
  channels flattened. Inductor makes it wherever it is read: where neighbours lay apart they are
  gathered for each pass, number by number (a softmax over 196 keys whose heads lay innermost took
  3.3 times as long as eager's), and a sum of thousands is one chain. Where many neighbours belong
  to different rows, rows are computed side by side, which is as fast.
- Functions that cost more than a store and are read more than once (`erf` in front of a norm).
- What is computed from a tensor, or from a view of it, before an operator that torch does not know
  the inside of writes into it. Inductor has it computed where it is read, with what is there then
  (2.13; wrong numbers without a word).
- What a kernel of ours reads with its last dimensions merged or split (features of an image).
  Inductor computes it in the kernel's shape, with a division for each number and no vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import AutoFunctionalized, AutoFunctionalizedV2

from lowering import outputs, totals
from lowering.gathered import RESHAPES, copies_read_by, gathers, reduced
from lowering.graphs import is_known

aten = torch.ops.aten

_SUMS = {aten.mean.dim, aten.sum.dim_IntList, aten.var.correction}
# What reads a row before anything else of it can be computed.
_FIRST_PASSES = {aten.amax.default, aten.var_mean.correction, *_SUMS}
# Inductor itself computes exp, tanh and sigmoid once, and some versions logarithms.
_COSTLY = {
    *(
        getattr(aten, name).default
        for name in "acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc erfinv exp2"
        " expm1 gelu lgamma log log10 log1p log2 sin sinh tan".split()
    ),
    aten.pow.Tensor_Tensor,
    aten.pow.Scalar,
}


def mark(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for, the last thing before."""
    for target in _FIRST_PASSES:
        for reader in graph.find_nodes(op="call_function", target=target):
            for copy, again in copies_read_by(reader):
                if (again or _is_long_sum(reader)) and gathers(copy, reader):
                    _write(copy)
    for costly in _costly_ones_read_again(graph):
        _write(costly)
    for reader in _readers_of_what_is_written_later(graph):
        _write(reader)
    for target in RESHAPES:
        for reshaped in graph.find_nodes(op="call_function", target=target):
            source = _computed(reshaped.args[0])
            if source and any(map(_is_kernel, reshaped.users)) and _merges_or_splits(reshaped):
                _write(source)


def _readers_of_what_is_written_later(graph: fx.Graph) -> Iterator[fx.Node]:
    seen: dict[fx.Node, list[fx.Node]] = {}  # of each tensor, who reads its memory
    for node in graph.nodes:
        if isinstance(node.target, AutoFunctionalized | AutoFunctionalizedV2):
            written = {outputs.memory_of(one) for one in node.all_input_nodes}
            yield from (reader for one in written for reader in seen.pop(one, ()))
        elif node.op == "call_function" and not outputs.is_view(node):
            for one in node.all_input_nodes:
                seen.setdefault(outputs.memory_of(one), []).append(node)


def _costly_ones_read_again(graph: fx.Graph) -> Iterator[fx.Node]:
    """What Inductor would compute for each of its readers, and then once for each pass of these."""
    costly: set[fx.Node] = set()
    for node in graph.nodes:
        if not outputs.is_pointwise(node) and not outputs.is_view(node):
            continue
        if not _is_costly(node) and costly.isdisjoint(node.all_input_nodes):
            continue
        if len(node.users) > 1 and outputs.is_pointwise(node) and _is_in_rows(node):
            yield node
        else:
            costly.add(node)


def _is_costly(node: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return not _is_cheap_exponent(node.args[1])
    return node.target in _COSTLY


def _is_cheap_exponent(exponent: Any) -> bool:
    """Does Inductor take a root, or multiply? It may be a symbol, too, or not finite."""
    if not isinstance(exponent, (int, float)):
        return False
    return exponent == 0.5 or (exponent % 1 == 0 and abs(exponent) < 32)


def _is_in_rows(node: fx.Node) -> bool:
    """Images are not: Inductor may lay them otherwise than traced."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    known = all(map(is_known, value.shape))
    return known and 0 < value.dim() < 4 and outputs.lies_in_rows(value)


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
