"""Convolutions of one image whose results are summed up, found where Dynamo sees them.

RepVGG, MobileOne, RepViT and networks of large kernels are trained in branches: kernels of several
sizes, and a BatchNorm of the image itself, which is a kernel of one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from lowering import writing
from lowering.graphs import same_sizes
from lowering.regions.calls import (
    arguments,
    has_transforms,
    is_no_dropout,
    keeps_value,
    name_of,
    value_of,
)

_IN_PLACE = ("add_", "iadd", "__iadd__")
_SUMS = ("add", "__add__", "__radd__", *_IN_PLACE)
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_NORM = "input running_mean running_var weight bias training momentum eps".split()
# An image is large beside the numbers that are summed up around it, and each of those rounds then.
_MOST_AROUND_IMAGE = 1024
_FLOATS = (torch.float32, torch.float64)  # in fewer bits the sum of kernels is less exact


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


@dataclass
class Sum:
    node: fx.Node
    merges: list[Merge] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)  # what else is in it
    nodes: list[fx.Node] = field(default_factory=list)  # that compute it from its terms

    def gone(self) -> set[fx.Node]:
        """What nobody needs any more."""
        merged = [branch for merge in self.merges for branch in merge.branches]
        return {*self.nodes, *(node for branch in merged for node in branch.nodes)}


def find(module: fx.GraphModule, weights: Collection[str]) -> list[Sum]:
    """`weights`: the names of the inputs that stay what they are from call to call."""
    graph = module.graph
    nodes = [node for node in graph.nodes if name_of(node) in _SUMS]
    if not nodes or has_transforms(graph) or _casts(graph):
        return []
    written = writing.written_storages(module)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name in weights]
    stays = {node for node in inputs if not _shared(writing.storages([node]), written)}
    found: list[Sum] = []
    within: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in within and (terms := _terms(node)) is not None:
            one = _sum(node, terms, stays)
            within.update(one.nodes)
            if one.merges and not _is_written_meanwhile(one):
                found.append(one)
    return found


def _casts(graph: fx.Graph) -> bool:
    """Autocast would have the summed kernels in fewer bits."""
    return torch.is_autocast_enabled("cpu") or any(
        name_of(node) == "_enter_autocast" for node in graph.nodes
    )


# --- sums and their terms -------------------------------------------------------------------------


def _sum(node: fx.Node, terms: Iterable[fx.Node], stays: Collection[fx.Node]) -> Sum:
    result = Sum(node, nodes=[node])
    branches: dict[fx.Node, list[Branch]] = {}
    waiting = list(terms)
    while waiting:
        term = waiting.pop(0)
        inner = _terms(term) if len(term.users) == 1 else None
        if inner is not None:
            result.nodes.append(term)
            waiting[:0] = inner
        elif (branch := _branch(term, stays)) is not None:
            branches.setdefault(branch.image, []).append(branch)
        else:
            result.others.append(term)
    for image, of_image in branches.items():
        whole = [term for term in result.others if term is image]
        merges, alone = _merged([*of_image, *(Branch(image) for _ in whole)])
        result.merges += merges
        result.others = [term for term in result.others if term is not image]
        result.others += [branch.value for branch in alone]
    return result


def _terms(node: fx.Node) -> list[fx.Node] | None:
    """What it adds up, if that is all it does. Zero, from which sums begin, is no term."""
    if name_of(node) not in _SUMS or len(node.args) != 2 or node.kwargs:
        return None
    value = value_of(node)
    if value is None or value.dtype not in _FLOATS or value.device.type != "cpu":
        return None
    terms: list[Any] = [term for term in node.args if not _is_zero(term)]
    if not all(_fits(term, value) for term in terms):
        return None
    into: Any = node.args[0]
    if name_of(node) in _IN_PLACE and isinstance(into, fx.Node) and not _is_fresh(into):
        return None
    return terms


def _is_zero(term: Any) -> bool:
    return type(term) in (int, float) and term == 0


def _fits(term: Any, value: torch.Tensor) -> bool:
    own = value_of(term)
    return own is not None and own.dtype == value.dtype and same_sizes(own.shape, value.shape)


def _is_fresh(node: fx.Node) -> bool:
    """New memory that one node reads: who writes into that changes nothing else."""
    fresh = (*_SUMS, *_PRODUCTS, *_CONVOLUTIONS, "batch_norm")
    return len(node.users) == 1 and name_of(node) in fresh


def _is_written_meanwhile(found: Sum) -> bool:
    """Is anything that the sum is made of changed before it is made now?"""
    own = found.gone()
    read = writing.storages(
        [*found.others, *(branch.image for merge in found.merges for branch in merge.branches)]
    )
    node = min(own)
    while node is not found.node:
        if node not in own and _shared(read, writing.storages(writing.maybe_written_by(node))):
            return True
        node = node.next
    return False


def _shared(some: set[int | None], others: set[int | None]) -> bool:
    return bool(some & others - {None})


# --- branches -------------------------------------------------------------------------------------


def _branch(node: Any, stays: Collection[fx.Node]) -> Branch | None:
    if not isinstance(node, fx.Node) or len(node.users) != 1 or value_of(node) is None:
        return None
    name = name_of(node)
    if name in _CONVOLUTIONS:
        return _convolution(node, stays)
    if name == "batch_norm":
        return _normed(node, stays)
    if name in _PRODUCTS and len(node.args) == 2 and not node.kwargs:
        return _scaled(node, stays)
    if keeps_value(node) or is_no_dropout(node):
        inner = _branch(node.args[0], stays)
        return None if inner is None else replace(inner, nodes=(*inner.nodes, node))
    return None


def _scaled(node: fx.Node, stays: Collection[fx.Node]) -> Branch | None:
    first, factor = node.args if isinstance(node.args[0], fx.Node) else reversed(node.args)
    inner = _branch(first, stays)
    if inner is None or type(factor) not in (int, float):
        return None
    return replace(inner, factor=inner.factor * factor, nodes=(*inner.nodes, node))


def _normed(node: fx.Node, stays: Collection[fx.Node]) -> Branch | None:
    given = arguments(node, _NORM, {"training": False, "eps": 1e-5})
    inner = _branch(given["input"], stays)
    if inner is None or inner.norm is not None or inner.factor != 1:
        if not isinstance(given["input"], fx.Node):
            return None
        inner = Branch(given["input"])
    norm = Norm(*(given[name] for name in (*_NORM[1:5], "eps")))
    needed, optional = norm[:2], norm[2:4]
    if given["training"] or not _all_stay([*needed, *(t for t in optional if t)], stays):
        return None
    return replace(inner, norm=norm, nodes=(*inner.nodes, node))


def _all_stay(tensors: Iterable[Any], stays: Collection[fx.Node]) -> bool:
    return all(
        isinstance(tensor, fx.Node) and tensor in stays and value_of(tensor).dtype in _FLOATS
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


# --- which of them fit into another's kernel -------------------------------------------------------


def _merged(branches: list[Branch]) -> tuple[list[Merge], list[Branch]]:
    """As merges, and those that are left alone."""
    merges: list[Merge] = []
    alone: list[Branch] = []
    waiting = sorted(branches, key=lambda branch: -branch.taps)
    while waiting and waiting[0].window is not None:
        largest, *others = waiting
        places = [(branch, _places(branch, largest)) for branch in others]
        fitting = [(largest, [0, 1] * len(largest.window.size))]
        fitting += [(branch, place) for branch, place in places if place is not None]
        if len(fitting) == 1:
            alone.append(largest)
        else:
            merges.append(Merge([one for one, _ in fitting], sum((p for _, p in fitting), [])))
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
    for own, whole in zip(zip(*window, strict=True), zip(*largest.window, strict=True), strict=True):
        size, stride, padding, dilation = own
        whole_size, whole_stride, whole_padding, grid = whole
        first, step = whole_padding - padding, dilation if size > 1 else grid
        if stride != whole_stride or first < 0 or first % grid or step % grid:
            return None
        if first + step * (size - 1) > grid * (whole_size - 1):
            return None
        places += [first // grid, step // grid]
    return places
