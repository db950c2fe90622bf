"""What is done to each pixel of images between convolutions, as one step where that can be:

act(norm(image) * factors + before) * times + after
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowering.convolution_steps import (
    DILATION,
    GROUPS,
    PADDING,
    STRIDE,
    Kind,
    Member,
    Members,
    Step,
    is_convolution,
    is_image_of_ours,
)
from lowering.graphs import only_first_output, same_sizes
from lowering.regions.epilogue import ACTIVATIONS, activation_of
from lowering.regions.weights import Stays

aten = torch.ops.aten
Change = Callable[[Step], Step | None]
_SCALE, _SHIFT, _MEAN = 2, 3, 4  # among the tensors of a step
_RESHAPED = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)


def norm(node: fx.Node, found: Members, _stays: Stays) -> Member | None:
    """A BatchNorm with fixed statistics."""
    of: Any = node.args[0]
    image, weight, bias, mean, var, _, eps = of.args
    if only_first_output(of) is not node or not is_image_of_ours(image, found):
        return None
    tensors = (None, None, weight, bias, mean, var)
    step = Step(Kind.POINTWISE, image, tensors=tensors, numbers=(eps, 0.0, 0.0))
    return Member(node, [step], (of,))


def factors_for(reader: fx.Node, found: Members) -> tuple[fx.Node, fx.Node] | None:
    """The image and the factors of its channels, if this convolution alone reads their product: one
    of single pixels multiplies what it reads."""
    product: Any = reader.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return None
    alone = len(product.users) == 1 and list(reader.args).count(product) == 1
    return _factors(product, found) if alone and _is_of_single_pixels(reader) else None


def _is_of_single_pixels(convolution: fx.Node) -> bool:
    """And with all channels in each sum."""
    args: Any = convolution.args
    sizes = (*args[1].meta["val"].shape[2:], *args[STRIDE], *args[DILATION], args[GROUPS])
    return all(size == 1 for size in sizes) and not any(args[PADDING])


def _factors(product: fx.Node, found: Members) -> tuple[fx.Node, fx.Node] | None:
    parts: Any = product.args
    if product.kwargs or len(parts) != 2:
        return None
    if not all(is_image_of_ours(part, found) for part in parts):
        return None
    image, factors = sorted(parts, key=lambda part: _is_one_pixel(part.meta["val"]))
    sizes, each = image.meta["val"].shape, factors.meta["val"].shape
    if len(sizes) != 4 or not same_sizes((*sizes[:2], 1, 1), each):
        return None
    return None if _is_one_pixel(image.meta["val"]) else (image, factors)


def _is_one_pixel(value: torch.Tensor) -> bool:
    return all(type(size) is int and size == 1 for size in value.shape[2:])


def _activation(node: fx.Node, found: dict[fx.Node, Member], _stays: Stays) -> Member | None:
    activation = activation_of(node)
    if activation is None or not is_image_of_ours(node.args[0], found):
        return None
    act = ACTIVATIONS.index(activation.name)

    def change(step: Step) -> Step | None:
        if step.act or step.times is not None:
            return None
        if (step := _with_sum_before(step)).after is not None:
            return None
        numbers = (step.numbers[0], float(activation.a), float(activation.b))
        return replace(step, act=act, numbers=numbers)

    return _changed(node, node.args[0], found, change)


def _sum(node: fx.Node, found: dict[fx.Node, Member], stays: Stays) -> Member | None:
    if shifted := _by_channel(node, found, stays):
        image, shift = shifted
        return _changed(node, image, found, lambda step: _with_tensor(step, _SHIFT, shift))
    if (pair := _two_images(node, found)) is None:
        return None

    def change(step: Step, other: fx.Node) -> Step | None:
        step = step if step.after is None else _with_sum_before(step)
        return replace(step, after=other) if step.after is None else None

    return _either_changed(node, *pair, found, change)


def _product(node: fx.Node, found: dict[fx.Node, Member], stays: Stays) -> Member | None:
    if scaled := _by_channel(node, found, stays):
        image, scale = scaled
        return _changed(node, image, found, lambda step: _with_tensor(step, _SCALE, scale))
    if pair := _factors(node, found):
        reader = next(iter(node.users))
        if is_convolution(reader) and factors_for(reader, found):
            return None
        image, factors = pair
        return Member(node, [Step(Kind.POINTWISE, image, factors=factors)])
    if (pair := _two_images(node, found)) is None:
        return None

    def change(step: Step, other: fx.Node) -> Step | None:
        step = step if step.after is None else _with_sum_before(step)
        free = step.times is None and step.after is None
        return replace(step, times=other) if free else None

    return _either_changed(node, *pair, found, change)


def _by_channel(node: fx.Node, found: Members, stays: Stays) -> tuple[fx.Node, fx.Node] | None:
    """An image and a weight that has a number for each of its channels, or one for all."""
    parts: Any = node.args
    if node.kwargs or len(parts) != 2:
        return None
    image, weight = parts if is_image_of_ours(parts[0], found) else reversed(parts)
    if not is_image_of_ours(image, found) or not isinstance(weight, fx.Node):
        return None
    source: Any = weight.args[0] if weight.target in _RESHAPED else weight
    if source not in stays or source.meta["val"].dtype != image.meta["val"].dtype:
        return None
    channels, sizes = image.meta["val"].shape[1], weight.meta["val"].shape
    whole = (1,) * (image.meta["val"].dim() - len(sizes)) + tuple(sizes)
    of_channels = whole[1] in (1, channels) and all(n == 1 for n in (whole[0], *whole[2:]))
    return (image, source) if of_channels and source.meta["val"].is_contiguous() else None


def _with_tensor(step: Step, which: int, tensor: fx.Node) -> Step | None:
    """With a scale or a shift of its own. There is one of each, and nothing before them."""
    later = (step.before, step.times, step.after, step.factors, step.tensors[_SHIFT])
    if step.act or any(one is not None for one in later):
        return None
    if which == _SCALE and step.tensors[_SCALE] is not None:
        return None
    tensors = list(step.tensors)
    tensors[which] = tensor
    return None if step.tensors[_MEAN] is not None else replace(step, tensors=tensors)


def _with_sum_before(step: Step) -> Step:
    """The same, with what it adds last as what it adds first: where nothing is between."""
    if step.act or step.times is not None or step.before is not None:
        return step
    return replace(step, before=step.after, after=None)


def _two_images(node: fx.Node, found: Members) -> tuple[fx.Node, fx.Node] | None:
    parts: Any = node.args
    if node.kwargs or len(parts) != 2 or not all(is_image_of_ours(part, found) for part in parts):
        return None
    one, other, made = (part.meta["val"] for part in (*parts, node))
    if not one.dtype == other.dtype == made.dtype or not same_sizes(one.shape, other.shape):
        return None
    return parts[0], parts[1]


def _either_changed(
    node: fx.Node,
    one: fx.Node,
    other: fx.Node,
    found: dict[fx.Node, Member],
    change: Callable[[Step, fx.Node], Step | None],
) -> Member | None:
    """By the step that makes one of them, if it can be, else by a step that reads both."""
    orders = [] if one is other else [(one, other), (other, one)]
    for image, beside in orders:
        step = _own(image, found)
        if step is not None and (changed := change(step, beside)) is not None:
            return _merged(node, image, found, changed)
    fresh = change(Step(Kind.POINTWISE, one), other)
    return None if fresh is None else Member(node, [fresh])


def _changed(
    node: fx.Node, image: Any, found: dict[fx.Node, Member], change: Change
) -> Member | None:
    """By the step that makes the image, if it can be, else by one that reads it."""
    step = _own(image, found)
    if step is not None and (changed := change(step)) is not None:
        return _merged(node, image, found, changed)
    fresh = change(Step(Kind.POINTWISE, image))
    return None if fresh is None else Member(node, [fresh])


def _own(image: fx.Node, found: Members) -> Step | None:
    """The step that makes an image which nobody else reads."""
    member = found[image]
    return member.steps[0] if member.kind is Kind.POINTWISE and len(image.users) == 1 else None


def _merged(node: fx.Node, image: fx.Node, found: dict[fx.Node, Member], step: Step) -> Member:
    before = found.pop(image)
    return Member(node, [step], (*before.inner, image))


_ACTIVATIONS = (
    aten.relu.default,
    aten.silu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.gelu.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.leaky_relu.default,
    aten.elu.default,
)
READERS: Mapping[Any, Callable[..., Member | None]] = {
    aten.add.Tensor: _sum,
    aten.mul.Tensor: _product,
    **dict.fromkeys(_ACTIVATIONS, _activation),
}
