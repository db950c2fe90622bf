"""Group and instance norm of images that only we have laid channels last: as exact as in rows.

Torch adds up a channels-last image pixel by pixel, and for group norm takes the square of the mean
off the mean of the squares: on 128x128 pixels its error is 20 times that of the same numbers in
rows (torch 2.13). In a model whose own images lie in rows this would be ours, layer after layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowering import outputs
from lowering.graphs import hint, same_sizes
from lowering.regions import group_norm as region

aten = torch.ops.aten

# Up to here torch's kernel adds up few enough numbers to stay below a convolution's error.
_FEW_PIXELS = 256
# Numbers that are taken off the mean and squared at a time: they stay in a core's own cache.
_AT_A_TIME = 65536

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "group_norm(Tensor image, Tensor? weight, Tensor? bias, SymInt groups, float eps) -> Tensor"
)
_OURS = torch.ops.kernel_dispatch.group_norm.default


def put_right(graph: fx.Graph, wanted: dict[fx.Node, Sequence[Any]]) -> bool:
    """`wanted`: the strides that tensors had in the user's own code. Says if there were any."""
    replaced = False
    for node in region.of_groups(graph):
        image, weight, bias, *_, groups, eps = node.args
        if _wants_result_only(node) and _is_moved(node, image, wanted):
            new = _replace(graph, node, _OURS, (image, weight, bias, groups, eps))
            wanted[new] = _in_rows(image)
            replaced = True
    for node in region.of_instances(graph):
        args = region.arguments_of_instances(node)
        if (
            args
            and args[0] is not node.args[0]
            and _wants_result_only(node)
            and _is_moved(node, args[0], wanted)
        ):
            _replace_instance_norm(graph, node, args, wanted)
            replaced = True
    return replaced


def _in_rows(image: fx.Node) -> Sequence[Any]:
    value: Tensor = image.meta["val"]
    return torch.empty_like(value, memory_format=torch.contiguous_format).stride()


def _replace_instance_norm(
    graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], wanted: dict[fx.Node, Sequence[Any]]
) -> None:
    image, flat = args[0], node.args[0]
    assert isinstance(flat, fx.Node)
    new = _replace(graph, node, _OURS, args, flat.args[1])
    wanted[new] = _in_rows(image)
    for view in [user for user in new.users if user.target in region.VIEWS]:
        for back in [user for user in view.users if user.target in region.VIEWS]:
            if same_sizes(back.meta["val"].shape, image.meta["val"].shape):
                back.replace_all_uses_with(new)


def use_caller(graph: fx.Graph) -> None:
    """Torch's public function lays out what it reads; the operator that was traced raises where
    memory lies otherwise than the trace believed, as one image channels last may (torch 2.13)."""
    for node in region.of_groups(graph):
        image, weight, bias, *_, groups, eps = node.args
        if _wants_result_only(node):
            args = (image, groups, weight, bias, eps)
            _replace(graph, node, torch.group_norm, args)


def _wants_result_only(node: fx.Node) -> bool:
    return all(part.target is operator.getitem and part.args[1] == 0 for part in node.users)


def _is_moved(node: fx.Node, image: fx.Node, wanted: outputs.Strides) -> bool:
    value: Tensor = image.meta["val"]
    on_cpu = value.device.type == "cpu" and value.dtype == torch.float32
    if not on_cpu or value.dim() not in (4, 5):
        return False
    pixels = math.prod(map(hint, value.shape[2:]))
    was_in_rows = all(part in wanted and hint(wanted[part][-1]) == 1 for part in node.users)
    matters = pixels > _FEW_PIXELS and hint(value.shape[1]) > 1
    return matters and was_in_rows and outputs.lies_channels_last(value)


def _replace(
    graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], sizes: Any = None
) -> fx.Node:
    """`sizes`: of the old result, where the new one has others."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
        result = new
        if sizes is not None:
            new.meta["val"] = args[0].meta["val"]
            result = graph.call_function(aten.reshape.default, (new, sizes))
    for part in list(node.users):
        result.meta.update(part.meta)
        part.replace_all_uses_with(result)
        graph.erase_node(part)
    graph.erase_node(node)
    return new


def _group_norm(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> Tensor:
    """First the means, then the squares of what differs from them: exact for any mean."""
    images, channels, *space = image.shape
    count, by_group = math.prod(space), (images, groups, channels // groups)
    pixels = image.movedim(1, -1).reshape(images, count, channels)
    means = pixels.sum(1).div_(count)
    variances = _squares(pixels, means).div_(count).view(by_group)
    of_groups = means.view(by_group).mean(-1, keepdim=True)
    apart = (means.view(by_group) - of_groups).square_()  # of a channel's mean and its group's
    scale = (variances + apart).mean(-1, keepdim=True).add_(eps).rsqrt_().expand(*apart.shape)
    if weight is not None:
        scale = scale * weight.view(1, *by_group[1:])
    shift = -of_groups * scale if bias is None else bias.view(1, *by_group[1:]) - of_groups * scale
    per_channel = (images, channels, *[1] * len(space))
    return torch.addcmul(shift.reshape(per_channel), image, scale.reshape(per_channel))


def _squares(pixels: Tensor, means: Tensor) -> Tensor:
    """The sums over pixels of (pixel - mean)^2."""
    _, count, channels = pixels.shape
    images_at_a_time = max(1, _AT_A_TIME // max(1, count * channels))
    pixels_at_a_time = max(1, _AT_A_TIME // max(1, channels))
    sums = torch.zeros_like(means)
    several = (every.split(images_at_a_time) for every in (pixels, means, sums))
    for images, mean, total in zip(*several, strict=True):
        for part in images.split(pixels_at_a_time, 1):
            total += (part - mean[:, None]).square_().sum(1)
    return sums


def _laid_as_the_image(image: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(image)


_library.impl("group_norm", _group_norm, "CPU")
torch.library.register_fake("kernel_dispatch::group_norm", _laid_as_the_image, lib=_library)
