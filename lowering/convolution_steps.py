"""What may be computed in one call with convolutions, and how `openmp_convolutions` is told of it.

Besides convolutions these are things that networks have between them: squeeze and excitation,
pooling, channels that are put together or taken apart, and what is done to each pixel by itself.
Of a step, `image` is what it reads first; a member of a group is one step, or several that make one
value together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import fx

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
    POINTWISE = 4
    LARGEST = 5
    AVERAGE = 6
    AVERAGE_INSIDE = 7
    ENLARGED = 8


class Way(IntEnum):
    """In the order of `enum class Way` in native/layers.h."""

    PLAIN = 0
    WINOGRAD = 1
    BFLOAT16 = 2
    FLOAT16 = 3


# In reports.
NAMES = {
    Kind.MEAN: "mean",
    Kind.PART: "concatenation",
    Kind.SLICE: "slice",
    Kind.POINTWISE: "pointwise",
    Kind.LARGEST: "max_pool",
    Kind.AVERAGE: "avg_pool",
    Kind.AVERAGE_INSIDE: "avg_pool",
    Kind.ENLARGED: "enlarged",
}
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

    @property
    def name(self) -> str:
        """In reports; none of a convolution."""
        normed = self.kind is Kind.POINTWISE and self.weights()
        return "norm_before" if normed else NAMES.get(self.kind, "")

    def weights(self) -> list[Any]:
        return [tensor for step in self.steps for tensor in step.tensors if tensor is not None]


Members = Mapping[fx.Node, Member]


def is_convolution(node: fx.Node) -> bool:
    name = "kernel_dispatch::openmp_convolution"
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name


def sides(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Above and to the left, below and to the right: of one list for both, or of two."""
    return padding[:dims], padding[-dims:]


def is_image_of_ours(node: Any, found: Members, ranks: tuple[int, ...] = (3, 4)) -> bool:
    """Made by a member, channels last, of a known number of channels."""
    if not isinstance(node, fx.Node) or node not in found or node.kwargs.get("rows"):
        return False
    return node.meta["val"].dim() in ranks and type(node.meta["val"].shape[1]) is int
