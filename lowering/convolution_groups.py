"""Convolutions that read each other in one call: `openmp_convolutions`, for several of the other.

The operator then sees neighbours and need not write what is between them to memory, and a call
costs as much as half a layer of a small network. What else may stand between them, and be part of
the call: `lowering/convolution_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.convolution_members import members
from lowering.convolution_steps import (
    ACT,
    AFTER,
    BEFORE,
    PADDING,
    PREVIOUS,
    STRIDE,
    TIMES,
    Kind,
    Member,
    Members,
    is_convolution,
    sides,
)
from lowering.graphs import same_sizes
from lowering.regions.weights import Stays

aten = torch.ops.aten
_NOTHING = -1
# Others are written by Inductor with whatever reads them.
_MAY_BE_LAST = (Kind.CONVOLUTION, Kind.MEAN)


def join(graph: fx.Graph, stays: Stays) -> list[str]:
    """Replace every group of convolutions of which only the last one is read by others; returns
    what else is in the groups."""
    for node in list(graph.nodes):
        if is_convolution(node):
            _take_padding(graph, node)
    found = members(graph, stays)
    ours = {node for member in found.values() for node in (member.node, *member.inner)}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _take_sum(graph, node, ours)
    found = members(graph, stays)
    kinds: set[tuple[Kind, str]] = set()
    for group in _groups(graph, found):
        if len(group) > 1 and any(is_convolution(node) for node in group):
            _replace(graph, _in_order(group, found))
            kinds |= {(found[node].kind, found[node].name) for node in group}
    return [name for _, name in sorted(kinds) if name]


def _replace(graph: fx.Graph, group: Sequence[Member]) -> None:
    last = group[-1].node
    with graph.inserting_before(last):
        new = graph.call_function(
            torch.ops.kernel_dispatch.openmp_convolutions.default,
            _arguments(group),
            dict(last.kwargs),  # how the output lies
        )
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    gone = {node for member in group for node in (member.node, *member.inner)}
    for node in reversed(graph.nodes):
        if node in gone and not node.users:
            graph.erase_node(node)


def _take_padding(graph: fx.Graph, node: fx.Node) -> None:
    """Zeros around the image that a node before adds: more below than above, as in TensorFlow."""
    args: Any = node.args
    padded, own, dims = args[0], args[PADDING], len(args[STRIDE])
    if padded.target is not aten.constant_pad_nd.default or len(padded.users) != 1:
        return
    image, more, value = (*padded.args, 0)[:3]
    if value != 0 or len(more) > 2 * dims or not all(type(n) is int and n >= 0 for n in more):
        return
    more = [*more, *[0] * (2 * dims - len(more))]  # (left, right, above, below)
    before, behind = sides(own, dims)
    node.update_arg(0, image)
    node.update_arg(
        PADDING,
        [p + n for p, n in zip(before, more[-2::-2], strict=True)]
        + [p + n for p, n in zip(behind, more[-1::-2], strict=True)],
    )
    graph.erase_node(padded)


def _take_sum(graph: fx.Graph, node: fx.Node, ours: set[fx.Node]) -> None:
    """A residual of which a convolution reads some channels only (regions want equal strides), or
    the second one behind a convolution."""
    if node.kwargs or not all(isinstance(part, fx.Node) for part in node.args):
        return
    parts: Any = node.args
    other, last = sorted(parts)
    if other not in ours or not is_convolution(last) or last.kwargs or len(last.users) > 1:
        return
    sizes = [part.meta["val"].shape for part in parts]
    # A sum of two dtypes is of the wider one, and what a group makes is of one.
    dtypes = {each.meta["val"].dtype for each in (node, *parts)}
    if other is last or not same_sizes(*sizes) or len(dtypes) > 1:
        return
    if last.args[AFTER] is not None:
        if last.args[ACT] or last.args[BEFORE] is not None or last.args[TIMES] is not None:
            return
        last.update_arg(BEFORE, last.args[AFTER])
    last.update_arg(AFTER, other)
    node.replace_all_uses_with(last)
    graph.erase_node(node)


# In the order in which they are found: whatever reads a member is before it, so the last one of all
# is the first one here.
Group = dict[fx.Node, None]


def _groups(graph: fx.Graph, found: Members) -> list[Group]:
    """Everything is in the group of those who read it; a convolution may be the last of its own."""
    group_of: dict[fx.Node, Group] = {}
    inner = {node for member in found.values() for node in member.inner}
    weights = {node for member in found.values() for node in member.weights()}
    groups = []
    for node in reversed(graph.nodes):
        reading = [group_of.get(user) for user in node.users]
        group = reading[0] if reading else None
        if any(other is not group for other in reading) or not _of_one_dtype(node, group):
            group = None
        if node in found:
            if group is None or node.kwargs.get("rows") or node in weights:
                if found[node].kind not in _MAY_BE_LAST or _is_returned(node):
                    continue
                group = {}
                groups.append(group)
            group[node] = None
        elif node not in inner or group is None:
            continue
        group_of[node] = group
    return groups


def _of_one_dtype(node: fx.Node, group: Group | None) -> bool:
    """What a group is given and makes; a list, of which it reads a part, has no dtype itself."""
    value = node.meta.get("val")
    if group is None or not isinstance(value, torch.Tensor):
        return True
    dtype: torch.dtype = next(iter(group)).meta["val"].dtype
    return value.dtype is dtype


def _is_returned(node: fx.Node) -> bool:
    """Where it has to lie as in eager; convolutions are told how."""
    return not is_convolution(node) and any(user.op == "output" for user in node.users)


def _in_order(group: Group, found: Members) -> list[Member]:
    """Each right behind the one whose image it convolves, where that can be."""
    ordered: dict[fx.Node, Member] = {}
    waiting = [next(iter(group))]
    while waiting:
        node = waiting[-1]
        missing = [part for part in found[node].images if part in group and part not in ordered]
        if missing:
            waiting.append(missing[-1])  # what lies beside the output before the image
        else:
            ordered[waiting.pop()] = found[node]
    return list(ordered.values())


def _arguments(group: Sequence[Member]) -> tuple[Any, ...]:
    made = {member.node for member in group}
    outside = [image for member in group for image in member.images if image not in made]
    given = list(dict.fromkeys(outside))
    number_of: dict[Any, int] = {None: _NOTHING}
    for value in given:
        number_of[value] = len(number_of) - 1
    count = len(given)  # of values so far
    tensors: list[Any] = []
    texts: list[str] = []
    for member in group:
        for step in member.steps:
            number_of[PREVIOUS] = count - 1
            tensors += [tensor for tensor in step.tensors if tensor is not None]
            texts.append(step.text(number_of.__getitem__))
            count += 1
        number_of[member.node] = count - 1
    return (given[0], tensors, " ".join(texts), given[1:])
