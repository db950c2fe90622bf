"""What may be computed in one call with convolutions, and how `openmp_convolutions` is told of it.

Besides convolutions these are things that networks have between them: squeeze and excitation,
BatchNorm that stands before its convolution, pooling, and channels that are put together or taken
apart. Of a step, `image` is what it reads first; a member of a group is one step, or several that
make one value together.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx

from lowering.graphs import only_first_output, same_sizes

aten = torch.ops.aten

# Arguments of `openmp_convolution`.
TENSORS = slice(1, 7)
EPS, STRIDE, PADDING, DILATION, GROUPS = range(7, 12)
BEFORE, TIMES, AFTER = 12, 13, 14  # what lies beside the output
ACT, A, B, WAY = range(15, 19)


class Kind(IntEnum):
    """In the order of `enum class Kind` in native/layers.h."""

    CONVOLUTION = 0
    MEAN = 1
    PART = 2
    SLICE = 3
    NORM = 4
    LARGEST = 5
    AVERAGE = 6
    AVERAGE_INSIDE = 7


class Way(IntEnum):
    """In the order of `enum class Way` in native/layers.h."""

    PLAIN = 0
    WINOGRAD = 1
    BFLOAT16 = 2


# In reports.
NAMES = {
    Kind.MEAN: "mean",
    Kind.PART: "concatenation",
    Kind.SLICE: "slice",
    Kind.NORM: "norm_before",
    Kind.LARGEST: "max_pool",
    Kind.AVERAGE: "avg_pool",
    Kind.AVERAGE_INSIDE: "avg_pool",
}
_RELU = 1  # in the order of `enum class Act` in native/epilogue.h
PREVIOUS = object()  # what the step before makes


@dataclass(frozen=True)
class Step:
    kind: Kind
    image: Any
    before: Any = None
    times: Any = None
    after: Any = None
    factors: Any = None
    tensors: Sequence[Any] = (None,) * 6
    window: Sequence[int] = (0,) * 8  # stride, padding above and left, below and right, dilation
    groups: int = 0
    act: int = 0
    way: Way = Way.PLAIN
    extent: tuple[int, int] = (0, 0)
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def reads(self) -> list[Any]:
        return [self.image, self.before, self.times, self.after, self.factors]

    def text(self, number_of: Callable[[Any], int]) -> str:
        """As `LayerText` in native/layer_text.h reads it. `number_of`: of a value that is read."""
        there = sum(1 << i for i, tensor in enumerate(self.tensors) if tensor is not None)
        read = [number_of(value) for value in self.reads()]
        own = (self.groups, self.act, self.way)
        bits = (struct.unpack("<q", struct.pack("<d", number))[0] for number in self.numbers)
        every = (there, *self.window, *own, *read, self.kind, *self.extent, *bits)
        return " ".join(str(int(one)) for one in every)


class Told(NamedTuple):
    """What a text says of a step, as far as sizes depend on it."""

    kind: Kind
    tensors: int
    image: int
    window: list[int]
    extent: list[int]


def told(text: str) -> list[Told]:
    return [
        Told(Kind(one[17]), one[0].bit_count(), one[12], one[1:9], one[18:20])
        for one in map(list, zip(*[map(int, text.split())] * _INTEGERS, strict=True))
    ]


_INTEGERS = 23  # in the text of a step, in the order in which `Step.text` writes them


@dataclass(frozen=True)
class Member:
    node: fx.Node  # its value
    steps: Sequence[Step]
    inner: tuple[fx.Node, ...] = ()  # other nodes that are computed with it

    @property
    def images(self) -> list[fx.Node]:
        """What it reads as such."""
        read = [value for step in self.steps for value in step.reads()]
        return [value for value in read if isinstance(value, fx.Node)]

    @property
    def kind(self) -> Kind:
        return self.steps[-1].kind

    def weights(self) -> list[Any]:
        return [tensor for step in self.steps for tensor in step.tensors if tensor is not None]


Members = Mapping[fx.Node, Member]


def members(graph: fx.Graph) -> dict[fx.Node, Member]:
    """By the node that is their value. All but convolutions read what other members make: what
    Inductor computes it can put together itself, in the same loop."""
    found: dict[fx.Node, Member] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (read := _READERS.get(node.target)):
            if (member := read(node, found)) is not None:
                found[node] = member
        elif is_convolution(node):
            found[node] = _convolution(node, found)
    return found


def is_convolution(node: fx.Node) -> bool:
    name = "kernel_dispatch::openmp_convolution"
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name


def sides(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Above and to the left, below and to the right: of one list for both, or of two."""
    return padding[:dims], padding[-dims:]


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
    product = args[0]
    if (factors := _factors(product, node, found)) is None:
        return Member(node, [step])
    return Member(node, [replace(step, image=factors[0], factors=factors[1])], (product,))


def _factors(node: fx.Node, reader: fx.Node, found: Members) -> tuple[fx.Node, fx.Node] | None:
    """The image and the factors of its channels, if that is what `node` multiplies for one reader:
    an ungrouped convolution of single pixels. Both are what members make."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return None
    parts: Any = node.args
    if list(reader.args).count(node) != 1 or not _is_pointwise(reader):
        return None
    if not all(isinstance(part, fx.Node) and _is_image_of_ours(part, found) for part in parts):
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
    sizes = (*args[1].meta["val"].shape[2:], *args[STRIDE], *args[DILATION], args[GROUPS])
    return all(size == 1 for size in sizes) and not any(args[PADDING])


def _mean(node: fx.Node, found: Members) -> Member | None:
    """Of all pixels; the pixels stay as dimensions of size one."""
    args: Any = node.args
    image, dims, *keeps = args
    if node.kwargs or keeps != [True] or not _is_image_of_ours(image, found, ranks=(4,)):
        return None
    if sorted(dim % 4 for dim in dims) != [2, 3]:
        return None
    return Member(node, [Step(Kind.MEAN, image)])


def _concatenation(node: fx.Node, found: Members) -> Member | None:
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    rank = node.meta["val"].dim()
    if dim % rank != 1 or not all(_is_image_of_ours(part, found) for part in parts):
        return None
    total = _channels(node)
    steps: list[Step] = []
    for first, part in zip(accumulate(map(_channels, parts), initial=0), parts, strict=False):
        before = PREVIOUS if steps else None
        steps.append(Step(Kind.PART, part, before, extent=(first, total)))
    return Member(node, steps)


def _split(node: fx.Node, found: Members) -> Member | None:
    """One of the images that a split makes."""
    parts: Any = node.args[0]
    index: Any = node.args[1]
    image, values = parts.args[0], parts.meta["val"]
    dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    if not _is_image_of_ours(image, found) or dim % values[0].dim() != 1:
        return None
    sizes = [value.shape[1] for value in values]
    if not all(type(size) is int for size in sizes):
        return None
    return _some_channels(node, image, sum(sizes[:index]), (parts,))


def _slice(node: fx.Node, found: Members) -> Member | None:
    args: Any = node.args
    image, dim, start, _, step = _filled(args, (None, 0, 0, None, 1))
    if node.kwargs or step != 1 or not _is_image_of_ours(image, found):
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


def _norm(node: fx.Node, found: Members) -> Member | None:
    """A BatchNorm with fixed statistics."""
    norm: Any = node.args[0]
    image, weight, bias, mean, var, _, eps = norm.args
    if only_first_output(norm) is not node or not _is_image_of_ours(image, found):
        return None
    tensors = (None, None, weight, bias, mean, var)
    step = Step(Kind.NORM, image, tensors=tensors, numbers=(eps, 0.0, 0.0))
    return Member(node, [step], (norm,))


def _relu(node: fx.Node, found: dict[fx.Node, Member]) -> Member | None:
    image: Any = node.args[0]
    if not _is_image_of_ours(image, found):
        return None
    norm = found[image]
    if norm.kind is Kind.NORM and not norm.steps[0].act and len(image.users) == 1:
        del found[image]
        return Member(node, [replace(norm.steps[0], act=_RELU)], (*norm.inner, image))
    return Member(node, [Step(Kind.NORM, image, act=_RELU)])


def _largest(node: fx.Node, found: Members) -> Member | None:
    pool: Any = node.args[0]
    if only_first_output(pool) is not node:
        return None
    image, size, *rest = pool.args
    stride, padding, dilation, _ceil = _filled(rest, ([], [0, 0], [1, 1], False))
    return _window(Kind.LARGEST, node, found, image, (size, stride, padding, dilation), (pool,))


def _average(node: fx.Node, found: Members) -> Member | None:
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
    if not _is_image_of_ours(image, found, ranks=(4,)):
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


def _output(node: fx.Node, found: dict[fx.Node, Member]) -> Member | None:
    """Of an operator that has several."""
    maker: Any = node.args[0]
    read = _OUTPUTS.get(_name(maker.target)) if isinstance(maker, fx.Node) else None
    return None if read is None else read(node, found)


def _name(target: Any) -> str:
    return target.name().split(".")[0] if isinstance(target, torch._ops.OpOverload) else ""


_OUTPUTS: Mapping[str, Callable[..., Member | None]] = {
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::_native_batch_norm_legit_no_training": _norm,
    "aten::max_pool2d_with_indices": _largest,
    "prims::_low_memory_max_pool_with_offsets": _largest,
    "prims::_low_memory_max_pool2d_with_offsets": _largest,  # before torch 2.9
}
_READERS: Mapping[Any, Callable[..., Member | None]] = {
    aten.mean.dim: _mean,
    aten.cat.default: _concatenation,
    aten.slice.Tensor: _slice,
    aten.relu.default: _relu,
    aten.avg_pool2d.default: _average,
    operator.getitem: _output,
}


def may_stand_between(node: fx.Node) -> bool:
    """Is it of a kind that can be a member, if it reads images of other members?"""
    if node.target is not operator.getitem:
        return node.target in _READERS
    maker: Any = node.args[0]
    read = _OUTPUTS.get(_name(maker.target)) if isinstance(maker, fx.Node) else None
    return read is _split or (read is not None and only_first_output(maker) is node)


def _is_image_of_ours(node: Any, found: Members, ranks: tuple[int, ...] = (3, 4)) -> bool:
    """Made by a member, channels last, of a known number of channels."""
    if not isinstance(node, fx.Node) or node not in found or node.kwargs.get("rows"):
        return False
    return node.meta["val"].dim() in ranks and type(node.meta["val"].shape[1]) is int


def _filled(given: Sequence[Any], defaults: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments by position, with the defaults of those that were left out."""
    return (*given, *defaults[len(given) :])


def _channels(node: fx.Node) -> int:
    return int(node.meta["val"].shape[1])
