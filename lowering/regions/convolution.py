"""The convolution region: 1-D to 3-D, with the BatchNorm behind it and what may follow both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering import machine
from lowering.capability import Work
from lowering.graphs import hint, only_first_output
from lowering.regions import rows
from lowering.regions.weights import Stays, under_cast

aten = torch.ops.aten

# On images channels last, oneDNN adds up all products of a number in one chain; eager's own images
# in rows are added up in parts. Up to this long a chain stays within the contract.
LONGEST_CHAIN = 576
# torch multiplies smaller single images itself, as matrices, and adds those up in shorter parts.
_UNFOLDED_NUMBERS = 20480


def torch_unfolds(image: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Does torch itself compute this without oneDNN? (Of volumes it counts all but the rows.)"""
    large_kernel = all(size > 3 for size in weight.shape[-2:])
    if groups > 1 or large_kernel or hint(image.shape[0]) > 1:
        return False
    return math.prod(hint(size) for size in image.shape[:4]) <= _UNFOLDED_NUMBERS


@dataclass(frozen=True)
class Norm:
    """A BatchNorm in inference, which scales and shifts channels by constants."""

    weight: fx.Node | None
    bias: fx.Node | None
    mean: fx.Node
    var: fx.Node
    eps: float


@dataclass(frozen=True)
class Convolution:
    """One match; `node` is the convolution, or the BatchNorm behind it."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    norm: Norm | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def casts_weight(self) -> bool:
        return self.weight.meta["val"].dtype != self.dtype

    @property
    def stands_alone(self) -> bool:
        return rows.stands_alone(self.node, self.input)

    @property
    def is_product(self) -> bool:
        """Is each output pixel made of one input pixel, of all its channels?"""
        ones = (*self.weight.meta["val"].shape[2:], *self.stride, self.groups)
        return all(one == 1 for one in ones) and not any(self.padding)

    @property
    def winograd_pays(self) -> bool:
        weight, (images, _, *sizes) = self.weight.meta["val"], self.node.meta["val"].shape
        outputs, inputs, *kernel = weight.shape
        return all(step == 1 for step in self.stride) and winograd_pays(
            kernel, inputs, outputs // self.groups, hint(images), sizes, self.dilation
        )

    def work(self) -> Work:
        value, weight = self.node.meta["val"], self.weight.meta["val"]
        positions = math.prod(hint(size) for size in (value.shape[0], *value.shape[2:]))
        return Work(
            region="convolution",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * positions * weight.numel(),
            dynamic=any(not isinstance(size, int) for size in value.shape),
            shape_class=self._shape_class(),
        )

    def _shape_class(self) -> str:
        weight = self.weight.meta["val"]
        if self.groups > 1 and weight.shape[1] == 1:
            return "depthwise"
        widest = max(weight.shape[2:])
        return "pointwise" if widest == 1 else "spatial" if widest <= 3 else "wide"


def winograd_pays(
    kernel: Sequence[int],
    inputs: int,
    outputs: int,
    images: int,
    sizes: Sequence[Any],
    dilation: Sequence[int],
) -> bool:
    """Does a convolution with stride 1 take less time in tiles of 2x2 outputs?

    Transforming inputs and outputs has to be little beside multiplying them, the last tiles of
    a small image (dilated, of each of its phases) may be half empty, and weights, which grow,
    are to be used by some tiles (measured: Zen 3 to 5).
    """
    fewest = 32 if machine.cpu().ends_at_avx2 else 16  # 16 took 1.2 to 1.6 times as long
    if tuple(kernel) != (3, 3) or inputs < fewest or inputs * outputs < 512:
        return False
    pixels = [hint(size) for size in sizes]
    tiles = math.prod(
        apart * -(-size // (2 * apart)) for size, apart in zip(pixels, dilation, strict=True)
    )
    return images * tiles >= 24 and 9 * math.prod(pixels) >= 1.65 * 16 * tiles


def find(graph: fx.Graph, stays: Stays) -> Iterator[Convolution]:
    node: Any
    for node in list(graph.nodes):
        if node.target is not aten.convolution.default:
            continue
        input, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        weight, bias = under_cast(weight), under_cast(bias)
        if transposed or weight not in stays or not stays.or_none(bias):
            continue
        if weight.meta["val"].dim() != node.meta["val"].dim():
            continue  # a single image without a batch
        found = norm_behind(node, stays)
        last, norm = (node, None) if found is None else found
        yield Convolution(
            last,
            input,
            weight,
            bias,
            for_each(stride, weight),
            for_each(padding, weight),
            for_each(dilation, weight),
            groups,
            norm,
        )


def for_each(numbers: Any, weight: fx.Node) -> list[int]:
    """One number for each spatial dimension; a single one holds for all of them."""
    dims = weight.meta["val"].dim() - 2
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


def norm_behind(node: fx.Node, stays: Stays) -> tuple[fx.Node, Norm] | None:
    if len(node.users) != 1:
        return None
    norm = next(iter(node.users))
    if norm.target is not aten._native_batch_norm_legit_no_training.default:
        return None
    used = only_first_output(norm)
    args: Any = norm.args  # (input, weight, bias, mean, variance, momentum, eps)
    weight, bias, mean, var = (under_cast(part) for part in args[1:5])
    if used is None or not all(map(stays.or_none, (weight, bias, mean, var))):
        return None
    return used, Norm(weight, bias, mean, var, float(args[6]))
