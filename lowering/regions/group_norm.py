"""The group_norm region: images whose groups of channels are normed, by `group_norm` or one by one.

Inductor takes it apart. Channels last its loop gathers the few channels of a group, without
vectors, and divides for each number: four to five times eager's time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lowering.capability import Work
from lowering.graphs import hint, same_sizes
from lowering.regions.weights import Stays

aten = torch.ops.aten
FEWEST_BYTES = 1 << 17  # of an image: a call costs what the kernel gains on 64 KiB
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
VIEWS = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class GroupNorm:
    node: fx.Node
    image: fx.Node
    scale: fx.Node | None
    shift: fx.Node | None
    groups: int
    eps: float

    def work(self) -> Work:
        value = self.image.meta["val"]
        numbers = math.prod(hint(size) for size in value.shape)
        return Work(
            region="group_norm",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=8 * numbers,
            bytes_moved=2 * numbers * value.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[GroupNorm]:
    for node in of_groups(graph):
        image, scale, shift, *_, groups, eps = list[Any](node.args)
        result = _only_result(node)
        if result is not None and isinstance(groups, int) and image.meta["val"].dim() > 2:
            yield GroupNorm(result, image, scale, shift, groups, eps)
    for node in of_instances(graph):
        result, args = _only_result(node), arguments_of_instances(node)
        if result is not None and args is not None:
            back = result if args[0] is node.args[0] else _view_back(result, args[0])
            if back is not None:
                yield GroupNorm(back, *args)


def may_be_taken(norm: Any, image: Tensor) -> bool:
    """Of the operator and what it reads, while a graph is traced: is it worth keeping whole?"""
    flat = norm is not aten.native_group_norm.default
    floats = image.device.type == "cpu" and image.dtype in _FLOATS
    if not floats or image.dim() < 3 or (flat and not same_sizes(image.shape[:1], (1,))):
        return False
    return math.prod(map(hint, image.shape)) * image.dtype.itemsize >= FEWEST_BYTES


def of_groups(graph: fx.Graph) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=aten.native_group_norm.default))


def of_instances(graph: fx.Graph) -> list[Any]:
    """Of each image by itself, or of a batch for which nobody keeps statistics."""
    target = aten._native_batch_norm_legit.no_stats
    return list(graph.find_nodes(op="call_function", target=target))


def _only_result(node: fx.Node) -> fx.Node | None:
    """The normed image, if nobody asks for means and deviations."""
    parts = list(node.users)
    is_alone = len(parts) == 1 and parts[0].target is operator.getitem and parts[0].args[1] == 0
    return parts[0] if is_alone else None


def arguments_of_instances(node: fx.Node) -> tuple[Any, Any, Any, int, float] | None:
    """As of a group norm: image, weight, bias, groups, eps. Torch views a batch as one image with
    all its channels, and repeats the weights for it; what was one image may go without views, and
    a view of anything else is an image by itself."""
    flat, weight, bias, of_the_image, _, eps = list[Any](node.args)
    image: Any = flat.args[0] if flat.target in VIEWS else flat
    if image.meta["val"].dim() != flat.meta["val"].dim():
        image = flat
    if not of_the_image or image.meta["val"].dim() < 3:
        return None
    images, channels, *space = image.meta["val"].shape
    parts = [_once(part, channels) for part in (weight, bias)]
    fits = same_sizes(flat.meta["val"].shape, (1, images * channels, *space))
    if not fits or not space or _UNKNOWN in parts or not isinstance(channels, int):
        return None
    return (image, *parts, channels, eps)


_UNKNOWN = object()


def _once(part: Any, channels: Any) -> Any:
    """A weight of each channel, before it was repeated for every image."""
    if part is None:
        return None
    if part.target is aten.repeat.default:
        part = part.args[0]
    return part if same_sizes(part.meta["val"].shape, (channels,)) else _UNKNOWN


def _view_back(result: fx.Node, image: fx.Node) -> fx.Node | None:
    """What is viewed as the images that came, if the flat result is used for nothing else."""
    views = list(result.users)
    if len(views) != 1 or views[0].target not in VIEWS:
        return None
    same = same_sizes(views[0].meta["val"].shape, image.meta["val"].shape)
    return views[0] if same else None
