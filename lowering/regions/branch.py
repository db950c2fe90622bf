"""One branch of a sum, as Dynamo sees it: a convolution, with or without a norm and a factor, or
the image itself. Which of them fit into the kernel of another one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from lowering import writing
from lowering.regions.calls import arguments, is_no_dropout, keeps_value, name_of, value_of

PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
FLOATS = (torch.float32, torch.float64)  # in fewer bits the sum of kernels is less exact
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_NORM = "input running_mean running_var weight bias training momentum eps".split()
# An image is large beside the numbers that are summed up around it, and each of those rounds then.
_MOST_AROUND_IMAGE = 1024


class Window(NamedTuple):
    """A number for each dimension of an image."""

    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


class Norm(NamedTuple):
    """A BatchNorm with fixed statistics."""

    mean: fx.Node
    variance: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float


@dataclass(frozen=True)
class Branch:
    """norm(weight * image + bias) * factor"""

    image: fx.Node
    weight: fx.Node | None = None  # None: the image itself
    bias: fx.Node | None = None
    norm: Norm | None = None
    factor: float = 1.0
    window: Window | None = None
    groups: int = 1
    nodes: tuple[fx.Node, ...] = ()  # that compute it, its value last

    @property
    def value(self) -> fx.Node:
        return self.nodes[-1] if self.nodes else self.image

    @property
    def taps(self) -> int:
        return 0 if self.window is None else math.prod(self.window.size)

    @property
    def summands(self) -> int:
        """Of each number that it computes."""
        return math.prod(value_of(self.weight).shape[1:])

    def tensors(self) -> list[fx.Node | None]:
        mean, variance, weight, bias, _ = self.norm or (None, None, None, None, 0.0)
        return [self.weight, self.bias, mean, variance, weight, bias]


class Merge(NamedTuple):
    """Branches that the first one computes, when the kernels of the others are added to its own.

    Where: for each dimension of each branch, at which number of the kernel it begins, and its step.
    """

    branches: list[Branch]
    places: list[int]


def read(node: Any, stays: Collection[fx.Node]) -> Branch | None:
    if not isinstance(node, fx.Node) or len(node.users) != 1 or value_of(node) is None:
        return None
    if writing.is_opaque(node):  # another's function of the same name
        return None
    name = name_of(node)
    if name in CONVOLUTIONS:
        return _convolution(node, stays)
    if name == "batch_norm":
        return _normed(node, stays)
    if name in PRODUCTS and len(node.args) == 2 and not node.kwargs:
        return _scaled(node, stays)
    if keeps_value(node) or is_no_dropout(node):
        inner = read(node.args[0], stays)
        return None if inner is None else replace(inner, nodes=(*inner.nodes, node))
    return None


def _scaled(node: fx.Node, stays: Collection[fx.Node]) -> Branch | None:
    args: Any = node.args
    first, factor = args if isinstance(args[0], fx.Node) else reversed(args)
    inner = read(first, stays)
    if inner is None or type(factor) not in (int, float):
        return None
    return replace(inner, factor=inner.factor * factor, nodes=(*inner.nodes, node))


def _normed(node: fx.Node, stays: Collection[fx.Node]) -> Branch | None:
    given = arguments(node, _NORM, {"training": False, "eps": 1e-5})
    inner = read(given["input"], stays)
    if inner is None or inner.norm is not None or inner.factor != 1:
        if not isinstance(given["input"], fx.Node):
            return None
        inner = Branch(given["input"])
    norm = Norm(*(given[name] for name in (*_NORM[1:5], "eps")))
    needed, optional = norm[:2], norm[2:4]
    if type(norm.eps) not in (int, float):  # an input, where numbers are to be dynamic
        return None
    if given["training"] or not _all_stay(
        [*needed, *(one for one in optional if one is not None)], stays
    ):
        return None
    return replace(inner, norm=norm, nodes=(*inner.nodes, node))


def _all_stay(tensors: Iterable[Any], stays: Collection[fx.Node]) -> bool:
    return all(
        isinstance(tensor, fx.Node) and tensor in stays and value_of(tensor).dtype in FLOATS
        for tensor in tensors
    )


def _convolution(node: fx.Node, stays: Collection[fx.Node]) -> Branch | None:
    given = arguments(node, _CONVOLUTION, _DEFAULTS)
    weight, bias, image = given["weight"], given["bias"], given["input"]
    if not _all_stay([weight, *([] if bias is None else [bias])], stays):
        return None
    dims = value_of(weight).dim() - 2
    if value_of(image) is None or value_of(image).dim() != dims + 2:
        return None
    window = _window(tuple(value_of(weight).shape[2:]), given)
    if window is None:
        return None
    return Branch(image, weight, bias, window=window, groups=given["groups"], nodes=(node,))


def _window(size: Sequence[int], given: dict[str, Any]) -> Window | None:
    stride, dilation = (_each(given[name], len(size)) for name in ("stride", "dilation"))
    if stride is None or dilation is None:
        return None
    padding = _padding(given["padding"], size, dilation)
    return None if padding is None else Window(size, stride, padding, dilation)


def _padding(given: Any, size: Sequence[int], dilation: Sequence[int]) -> Sequence[int] | None:
    if given == "valid":
        given = 0
    if given != "same":
        return _each(given, len(size))
    more = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
    return None if any(one % 2 for one in more) else [one // 2 for one in more]


def _each(given: Any, dims: int) -> Sequence[int] | None:
    """A number for each dimension, where they are known."""
    each = [given] * dims if isinstance(given, int) else list(given)
    if len(each) == 1:
        each *= dims
    return each if len(each) == dims and all(type(one) is int for one in each) else None


# --- which of them fit into another's kernel ---------------------------------------------------


def merged(branches: list[Branch]) -> tuple[list[Merge], list[Branch]]:
    """As merges, and those that are left alone."""
    merges: list[Merge] = []
    alone: list[Branch] = []
    waiting = sorted(branches, key=lambda branch: -branch.taps)
    while waiting and (window := waiting[0].window) is not None:
        largest, *others = waiting
        places = [(branch, _places(branch, largest)) for branch in others]
        fitting = [(largest, [0, 1] * len(window.size))]
        fitting += [(branch, place) for branch, place in places if place is not None]
        if not any(branch.nodes for branch, _ in fitting[1:]):  # a residual costs next to nothing
            alone += [branch for branch, _ in fitting]
        else:
            merges.append(
                Merge([one for one, _ in fitting], [*chain(*(place for _, place in fitting))])
            )
        waiting = [branch for branch, place in places if place is None]
    return merges, [*alone, *waiting]


def _places(branch: Branch, largest: Branch) -> list[int] | None:
    assert largest.window is not None
    dims = len(largest.window.size)
    window = branch.window or Window(*((one,) * dims for one in (1, 1, 0, 1)))
    if branch.weight is not None and branch.groups != largest.groups:
        return None
    if branch.weight is None and largest.summands > _MOST_AROUND_IMAGE:
        return None
    places: list[int] = []
    for own, whole in zip(
        zip(*window, strict=True), zip(*largest.window, strict=True), strict=True
    ):
        size, stride, padding, dilation = own
        whole_size, whole_stride, whole_padding, grid = whole
        first, step = whole_padding - padding, dilation if size > 1 else grid
        if stride != whole_stride or first < 0 or first % grid or step % grid:
            return None
        if first + step * (size - 1) > grid * (whole_size - 1):
            return None
        places += [first // grid, step // grid]
    return places
