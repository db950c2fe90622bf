"""Convolutions that read each other in one call: `openmp_convolutions`, for several of the other.

The operator then sees neighbours and need not write what is between them to memory, threads stay
with their part of the images, and a call costs as much as half a layer of a small network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Arguments of `openmp_convolution`.
_TENSORS = slice(1, 7)
_EPS, _STRIDE, _PADDING, _DILATION, _GROUPS = range(7, 12)
_IMAGES = (0, 12, 13, 14)  # what is convolved, and what lies beside the output
_ACT, _A, _B, _WINOGRAD = range(15, 19)
_NOTHING = -1


def join(graph: fx.Graph) -> None:
    """Replace every group of convolutions of which only the last one is read by others."""
    for node in list(graph.nodes):
        if _is_convolution(node):
            _take_padding(graph, node)
    for group in _groups(graph):
        if len(group) > 1:
            _replace(graph, _in_order(group))


def _replace(graph: fx.Graph, group: Sequence[fx.Node]) -> None:
    last = group[-1]
    with graph.inserting_before(last):
        new = graph.call_function(
            torch.ops.kernel_dispatch.openmp_convolutions.default,
            _arguments(group),
            dict(last.kwargs),  # how the output lies
        )
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(group):
        graph.erase_node(node)


def sides(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Above and to the left, below and to the right: of one list for both, or of two."""
    return padding[:dims], padding[-dims:]


def _take_padding(graph: fx.Graph, node: fx.Node) -> None:
    """Zeros around the image that a node before adds: more below than above, as in TensorFlow."""
    args: Any = node.args
    padded, own, dims = args[0], args[_PADDING], len(args[_STRIDE])
    if padded.target is not aten.constant_pad_nd.default or len(padded.users) != 1:
        return
    image, more, value = (*padded.args, 0)[:3]
    if value != 0 or len(more) > 2 * dims or not all(type(n) is int and n >= 0 for n in more):
        return
    more = [*more, *[0] * (2 * dims - len(more))]  # (left, right, above, below)
    before, behind = sides(own, dims)
    node.update_arg(0, image)
    node.update_arg(
        _PADDING,
        [p + n for p, n in zip(before, more[-2::-2], strict=True)]
        + [p + n for p, n in zip(behind, more[-1::-2], strict=True)],
    )
    graph.erase_node(padded)


def _is_convolution(node: fx.Node) -> bool:
    name = "kernel_dispatch::openmp_convolution"
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name


def _groups(graph: fx.Graph) -> list[set[fx.Node]]:
    """Every convolution is in the group of those who read it, or the last one of its own."""
    group_of: dict[fx.Node, set[fx.Node]] = {}
    groups = []
    for node in reversed(graph.nodes):
        if not _is_convolution(node):
            continue
        reading = [group_of.get(user) for user in node.users]
        group = reading[0] if reading else None
        if group is None or any(other is not group for other in reading) or not _is_image(node):
            group = set()
            groups.append(group)
        group.add(node)
        group_of[node] = group
    return groups


def _is_image(node: fx.Node) -> bool:
    """For all who read it; channels last."""
    if node.kwargs.get("rows"):
        return False
    return all(_images(user).count(node) == list(user.args).count(node) for user in node.users)


def _images(node: fx.Node) -> list[fx.Node]:
    """The image that a convolution reads, and those beside its output."""
    return [part for i in _IMAGES if isinstance(part := node.args[i], fx.Node)]


def _in_order(group: set[fx.Node]) -> list[fx.Node]:
    """Each right behind the one whose image it convolves, where that can be."""
    ordered: dict[fx.Node, None] = {}
    waiting = [node for node in group if not any(user in group for user in node.users)]
    while waiting:
        node = waiting[-1]
        missing = [part for part in _images(node) if part in group and part not in ordered]
        if missing:
            waiting.append(missing[-1])  # what lies beside the output before the image
        else:
            ordered[waiting.pop()] = None
    return list(ordered)


def _arguments(group: Sequence[fx.Node]) -> tuple[Any, ...]:
    outside = [part for node in group for part in _images(node) if part not in group]
    given = list(dict.fromkeys([group[0].args[0], *outside]))
    numbers_of_values: dict[Any, int] = {None: _NOTHING}
    for value in (*given, *group):
        numbers_of_values.setdefault(value, len(numbers_of_values) - 1)
    tensors: list[Any] = []
    integers: list[Any] = []
    numbers: list[Any] = []
    for node in group:
        args: Any = node.args
        tensors += args[_TENSORS]
        before, behind = sides(args[_PADDING], len(args[_STRIDE]))
        for one in (args[_STRIDE], before, behind, args[_DILATION]):
            integers += [*one] * (2 // len(one))
        integers += [args[_GROUPS], args[_ACT], int(args[_WINOGRAD])]
        integers += [numbers_of_values[args[i]] for i in _IMAGES]
        numbers += [args[_EPS], args[_A], args[_B]]
    return (given[0], tensors, integers, numbers, given[1:])
