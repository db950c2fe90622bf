"""Which nodes of a graph can be computed in one call with convolutions: the members of a group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from lowering import convolution_pointwise as pointwise
from lowering.convolution_enlarged import enlarged
from lowering.convolution_steps import (
    ACT,
    AFTER,
    BEFORE,
    DILATION,
    EPS,
    GROUPS,
    PADDING,
    PREVIOUS,
    STRIDE,
    TENSORS,
    TIMES,
    WAY,
    A,
    B,
    Kind,
    Member,
    Members,
    Step,
    is_convolution,
    is_image_of_ours,
    sides,
)
from lowering.graphs import only_first_output
from lowering.regions.weights import Stays

aten = torch.ops.aten


def members(graph: fx.Graph, stays: Stays) -> dict[fx.Node, Member]:
    """By the node that is their value. All but convolutions read what other members make: what
    Inductor computes it can put together itself, in the same loop."""
    found: dict[fx.Node, Member] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (read := _READERS.get(node.target)):
            if (member := read(node, found, stays)) is not None:
                found[node] = member
        elif is_convolution(node):
            found[node] = _convolution(node, found)
    return found


def _convolution(node: fx.Node, found: Members) -> Member:
    args: Any = node.args
    before, behind = sides(args[PADDING], len(args[STRIDE]))
    window: list[Any] = []
    for one in (args[STRIDE], before, behind, args[DILATION]):
        window += [*one] * (2 // len(one))
    step = Step(
        Kind.CONVOLUTION,
        *(args[0], args[BEFORE], args[TIMES], args[AFTER]),
        tensors=args[TENSORS],
        window=window,
        groups=args[GROUPS],
        act=args[ACT],
        way=args[WAY],
        numbers=(args[EPS], args[A], args[B]),
    )
    if (pair := pointwise.factors_for(node, found)) is None:
        return Member(node, [step])
    image, factors = pair
    return Member(node, [replace(step, image=image, factors=factors)], (args[0],))


def _mean(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    """Of all pixels; the pixels stay as dimensions of size one."""
    args: Any = node.args
    image, dims, *keeps = args
    if node.kwargs or keeps != [True] or not is_image_of_ours(image, found, ranks=(4,)):
        return None
    if sorted(dim % 4 for dim in dims) != [2, 3]:
        return None
    return Member(node, [Step(Kind.MEAN, image)])


def _concatenation(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    rank = node.meta["val"].dim()
    if dim % rank != 1 or not all(is_image_of_ours(part, found) for part in parts):
        return None
    if len({each.meta["val"].dtype for each in (node, *parts)}) > 1:
        return None
    total = _channels(node)
    steps: list[Step] = []
    for first, part in zip(accumulate(map(_channels, parts), initial=0), parts, strict=False):
        before = PREVIOUS if steps else None
        steps.append(Step(Kind.PART, part, before, extent=(first, total)))
    return Member(node, steps)


def _split(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    """One of the images that a split makes."""
    parts: Any = node.args[0]
    index: Any = node.args[1]
    image, values = parts.args[0], parts.meta["val"]
    dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    if not is_image_of_ours(image, found) or dim % values[0].dim() != 1:
        return None
    sizes = [value.shape[1] for value in values]
    if not all(type(size) is int for size in sizes):
        return None
    return _some_channels(node, image, sum(sizes[:index]), (parts,))


def _slice(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    args: Any = node.args
    image, dim, start, _, step = _filled(args, (None, 0, 0, None, 1))
    if node.kwargs or step != 1 or not is_image_of_ours(image, found):
        return None
    if dim % node.meta["val"].dim() != 1 or not isinstance(start, int):
        return None
    return _some_channels(node, image, start % _channels(image))


def _some_channels(
    node: fx.Node, image: fx.Node, first: int, inner: tuple[fx.Node, ...] = ()
) -> Member | None:
    count = node.meta["val"].shape[1]
    if type(count) is not int or count == 0:
        return None
    return Member(node, [Step(Kind.SLICE, image, extent=(first, count))], inner)


def _largest(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    pool: Any = node.args[0]
    if only_first_output(pool) is not node:
        return None
    image, size, *rest = pool.args
    stride, padding, dilation, _ceil = _filled(rest, ([], [0, 0], [1, 1], False))
    return _window(Kind.LARGEST, node, found, image, (size, stride, padding, dilation), (pool,))


def _average(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    args: Any = node.args
    image, size, *rest = args
    stride, padding, ceil, whole, divisor = _filled(rest, ([], [0, 0], False, True, None))
    if node.kwargs or ceil or divisor is not None:
        return None
    kind = Kind.AVERAGE if whole else Kind.AVERAGE_INSIDE
    return _window(kind, node, found, image, (size, stride, padding, [1, 1]))


def _window(
    kind: Kind,
    node: fx.Node,
    found: Members,
    image: Any,
    geometry: Sequence[Any],
    inner: tuple[fx.Node, ...] = (),
) -> Member | None:
    """Where the last window ends is the padding below and to the right, whatever it was called."""
    if not is_image_of_ours(image, found, ranks=(4,)):
        return None
    size, stride, padding, dilation = (list(one) for one in geometry)
    stride = stride or size
    if any(len(one) != 2 for one in (size, stride, padding, dilation)):
        return None
    sizes = zip(image.meta["val"].shape[2:], node.meta["val"].shape[2:], strict=True)
    behind = [
        (made - 1) * stride[i] + dilation[i] * (size[i] - 1) + 1 - given - padding[i]
        for i, (given, made) in enumerate(sizes)
    ]
    if not all(type(more) is int for more in behind):  # sizes that change
        return None
    window = (*stride, *padding, *behind, *dilation)
    return Member(node, [Step(kind, image, window=window, extent=(size[0], size[1]))], inner)


def _output(node: fx.Node, found: dict[fx.Node, Member], stays: Stays) -> Member | None:
    """Of an operator that has several."""
    maker: Any = node.args[0]
    read = _OUTPUTS.get(_name(maker.target)) if isinstance(maker, fx.Node) else None
    return None if read is None else read(node, found, stays)


def _name(target: Any) -> str:
    return target.name().split(".")[0] if isinstance(target, torch._ops.OpOverload) else ""


_OUTPUTS: Mapping[str, Callable[..., Member | None]] = {
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::_native_batch_norm_legit_no_training": pointwise.norm,
    "aten::max_pool2d_with_indices": _largest,
    "prims::_low_memory_max_pool_with_offsets": _largest,
    "prims::_low_memory_max_pool2d_with_offsets": _largest,  # before torch 2.9
}
_READERS: Mapping[Any, Callable[..., Member | None]] = {
    aten.mean.dim: _mean,
    aten.cat.default: _concatenation,
    aten.slice.Tensor: _slice,
    aten.avg_pool2d.default: _average,
    aten._unsafe_index.Tensor: enlarged,
    aten.index.Tensor: enlarged,
    operator.getitem: _output,
    **pointwise.READERS,
}


def may_stand_between(node: fx.Node) -> bool:
    """Is it of a kind that can be a member, if it reads images of other members?"""
    if node.target is not operator.getitem:
        return node.target in _READERS
    maker: Any = node.args[0]
    read = _OUTPUTS.get(_name(maker.target)) if isinstance(maker, fx.Node) else None
    return read is _split or (read is not None and only_first_output(maker) is node)


def _filled(given: Sequence[Any], defaults: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments by position, with the defaults of those that were left out."""
    return (*given, *defaults[len(given) :])


def _channels(node: fx.Node) -> int:
    return int(node.meta["val"].shape[1])
