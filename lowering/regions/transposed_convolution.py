"""Transposed convolutions of one to three dimensions, with the BatchNorm behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions import rows
from lowering.regions.convolution import Norm, for_each, norm_behind, torch_unfolds
from lowering.regions.weights import Stays, under_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class TransposedConvolution:
    """One match; `node` is the convolution, or the BatchNorm behind it."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: list[int]
    padding: list[int]
    output_padding: list[int]
    dilation: list[int]
    groups: int
    norm: Norm | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def stands_alone(self) -> bool:
        return rows.stands_alone(self.node, self.input)

    @property
    def products(self) -> int:
        """How many are added up to one number, at most."""
        inputs, _, *kernel = self.weight.meta["val"].shape
        pixels = [hint(size) for size in self.input.meta["val"].shape[2:]]
        # Of a dilated kernel, every so many-th tap falls on the same phase of the stride.
        steps = zip(self.stride, self.dilation, strict=True)
        apart = (step // math.gcd(step, gap) for step, gap in steps)
        sizes = zip(kernel, apart, pixels, strict=True)
        most = (min(-(-taps // step), size) for taps, step, size in sizes)
        return inputs // self.groups * math.prod(most)

    @property
    def torch_unfolds(self) -> bool:
        return torch_unfolds(self.input.meta["val"], self.weight.meta["val"], self.groups)

    def work(self) -> Work:
        image, weight = self.input.meta["val"], self.weight.meta["val"]
        positions = math.prod(hint(size) for size in (image.shape[0], *image.shape[2:]))
        return Work(
            region="transposed_convolution",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * positions * weight.numel(),
            dynamic=any(not isinstance(size, int) for size in image.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[TransposedConvolution]:
    node: Any
    for node in list(graph.nodes):
        if node.target is not aten.convolution.default:
            continue
        input, weight, bias, stride, padding, dilation, transposed, more, groups = node.args
        weight, bias = under_cast(weight), under_cast(bias)
        if not transposed or weight not in stays or not stays.or_none(bias):
            continue
        if weight.meta["val"].dim() != node.meta["val"].dim():
            continue  # a single image without a batch
        sizes = [for_each(numbers, weight) for numbers in (more, stride, dilation)]
        if not all(out < max(step, gap) for out, step, gap in zip(*sizes, strict=True)):
            continue  # torch raises, and says so
        found = norm_behind(node, stays)
        last, norm = (node, None) if found is None else found
        yield TransposedConvolution(
            last,
            input,
            weight,
            bias,
            for_each(stride, weight),
            for_each(padding, weight),
            for_each(more, weight),
            for_each(dilation, weight),
            groups,
            norm,
        )
