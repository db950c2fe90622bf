"""Variance and mean together (`torch.var_mean`, norms) become two sums where one loop is inexact.

Inductor computes both in one loop, in Welford's way. Where neighbours in memory belong to one row
that is exact enough for a norm, and reads the row once. Elsewhere it is a chain of thousands.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lowering import machine, reductions
from lowering.gathered import copies_read_by, gathers
from lowering.graphs import call

aten = torch.ops.aten

# With vectors of eight, a row of 4096 is a chain of 512: around a mean of 100 deviations its norm
# was off by 1.75 times what is allowed.
_LONGEST_ROW_WITH_AVX2 = 2048


def put_right(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for; before `reductions`."""
    for node in graph.find_nodes(op="call_function", target=aten.var_mean.correction):
        x: Any = node.args[0]
        dims = reductions.summed_dims(node, x.meta.get("val"))
        if dims and _may_be_off(node, x, dims):
            _take_apart(graph, node, x, dims)


def _may_be_off(node: fx.Node, x: fx.Node, dims: list[int]) -> bool:
    value = x.meta["val"]
    along = reductions.are_neighbours(value, dims)
    if reductions.are_few(value, dims, along):
        return False
    if not _is_of_a_norm(node):
        return True
    counted = all(isinstance(value.shape[dim], int) for dim in dims)
    if not counted or reductions.are_long_lines(value.shape, dims):
        return False  # two sums would be left to torch, which takes longer than the loop
    if any(gathers(copy, node) for copy, _ in copies_read_by(node)):
        return True
    widened = x.target is torch.ops.prims.convert_element_type.default  # exact for what it was
    return not widened and (not along or _is_long_chain([value.shape[dim] for dim in dims]))


def _is_long_chain(sizes: list[int]) -> bool:
    return machine.cpu().ends_at_avx2 and math.prod(sizes) > _LONGEST_ROW_WITH_AVX2


def _is_of_a_norm(node: fx.Node) -> bool:
    """Is the mean taken off something, with the variance only a scale?"""
    means = [item for item in node.users if item.args[1] == 1]
    goes_on = any(user.op != "output" for item in means for user in item.users)
    return bool(goes_on and node.kwargs.get("correction") == 0)


def _take_apart(graph: fx.Graph, node: fx.Node, x: fx.Node, dims: list[int]) -> None:
    with graph.inserting_before(node):
        variance = call(graph, aten.var.correction, x, dims, **node.kwargs)
        mean = call(graph, aten.mean.dim, x, dims, node.kwargs.get("keepdim", False))
    for user in list(node.users):
        which: Any = user.args[1]
        new = (variance, mean)[which]
        new.meta = {**user.meta, "val": new.meta["val"]}
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    for unused in (node, variance, mean):
        if not unused.users:
            graph.erase_node(unused)
