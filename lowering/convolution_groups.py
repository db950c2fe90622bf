"""Convolutions that read each other in one call: `openmp_convolutions`, for several of the other.

The operator then sees neighbours and need not write what is between them to memory, and a call
costs as much as half a layer of a small network. Squeeze and excitation takes part: the mean of
each channel's pixels, and the product of an image with what is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import same_sizes

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


def _is_mean(node: fx.Node) -> bool:
    """Of all pixels of what a convolution makes; the pixels stay as dimensions of size one."""
    if node.target is not aten.mean.dim or node.kwargs or node.args[2:] != (True,):
        return False
    image: Any = node.args[0]
    dims: Any = node.args[1]
    if not _is_convolution(image) or image.kwargs.get("rows"):
        return False
    rank = image.meta["val"].dim()
    return rank == 4 and sorted(dim % rank for dim in dims) == [2, 3]


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The image and the factors of its channels, if that is what `node` multiplies for one reader:
    an ungrouped convolution of single pixels. Both are what convolutions make."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return None
    (reader,) = node.users
    parts: Any = node.args
    if not _is_convolution(reader) or list(reader.args).count(node) != 1 or reader.args[0] != node:
        return None
    if not _is_pointwise(reader) or not all(isinstance(part, fx.Node) for part in parts):
        return None
    if not all(_is_convolution(part) and not part.kwargs.get("rows") for part in parts):
        return None
    image, factors = sorted(parts, key=lambda part: _is_one_pixel(part.meta["val"]))
    sizes, each = image.meta["val"].shape, factors.meta["val"].shape
    if len(sizes) != 4 or not same_sizes((*sizes[:2], 1, 1), each):
        return None
    return None if _is_one_pixel(image.meta["val"]) else (image, factors)


def _is_one_pixel(value: torch.Tensor) -> bool:
    return all(type(size) is int and size == 1 for size in value.shape[2:])


def _is_pointwise(node: fx.Node) -> bool:
    args: Any = node.args
    sizes = (*args[1].meta["val"].shape[2:], *args[_STRIDE], *args[_DILATION], args[_GROUPS])
    return all(size == 1 for size in sizes) and not any(args[_PADDING])


def _groups(graph: fx.Graph) -> list[set[fx.Node]]:
    """Everything is in the group of those who read it; a convolution may be the last of its own."""
    group_of: dict[fx.Node, set[fx.Node]] = {}
    groups = []
    for node in reversed(graph.nodes):
        reading = [group_of.get(user) for user in node.users]
        group = reading[0] if reading else None
        if any(other is not group for other in reading):
            group = None
        if _is_convolution(node):
            if group is None or not _is_image(node):
                group = set()
                groups.append(group)
        elif group is None or not (_is_mean(node) or _factors(node)):
            continue
        group.add(node)
        group_of[node] = group
    return groups


def _is_image(node: fx.Node) -> bool:
    """For all who read it; channels last."""
    if node.kwargs.get("rows"):
        return False
    return all(_images(user).count(node) == list(user.args).count(node) for user in node.users)


def _images(node: fx.Node) -> list[fx.Node]:
    """What a member of a group reads as images; a convolution also what lies beside its output."""
    if not _is_convolution(node):
        return list(node.all_input_nodes)
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
    factors = {node: found for node in group if (found := _factors(node))}
    layers = [node for node in group if node not in factors]
    outside = [part for node in group for part in _images(node) if part not in group]
    given = list(dict.fromkeys(outside))
    number_of: dict[Any, int] = {None: _NOTHING}
    for value in (*given, *layers):
        number_of.setdefault(value, len(number_of) - 1)
    tensors: list[Any] = []
    integers: list[Any] = []
    numbers: list[Any] = []
    for node in layers:
        own, read, of_epilogue = _layer(node) if _is_convolution(node) else _mean(node)
        image, by = factors.get(read[0], (read[0], None))
        tensors += own[0]
        integers += [*own[1], *(number_of[value] for value in (image, *read[1:], by))]
        numbers += of_epilogue
    return (given[0], tensors, integers, numbers, given[1:])


# Tensors and integers, what is read, and numbers.
_Step = tuple[tuple[Sequence[Any], Sequence[Any]], list[Any], Sequence[Any]]


def _layer(node: fx.Node) -> _Step:
    args: Any = node.args
    before, behind = sides(args[_PADDING], len(args[_STRIDE]))
    integers: list[Any] = []
    for one in (args[_STRIDE], before, behind, args[_DILATION]):
        integers += [*one] * (2 // len(one))
    integers += [args[_GROUPS], args[_ACT], int(args[_WINOGRAD])]
    return (args[_TENSORS], integers), [args[i] for i in _IMAGES], (args[_EPS], args[_A], args[_B])


def _mean(node: fx.Node) -> _Step:
    return ([None] * 6, [0] * 11), [node.args[0], None, None, None], (0.0, 0.0, 0.0)
