"""The product region: a matrix product, or a batch of them, of two tensors that both may change.

Products of two activations, and in training every product: forward, and both of the backward's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, same_sizes
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """left @ right (+ bias, one number for each column)."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        left, value = self.left.meta["val"], self.node.meta["val"]
        sizes = [hint(size) for size in (*value.shape, left.shape[-1])]
        return Work(
            region="product",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * math.prod(sizes),
            dynamic=any(not isinstance(size, int) for size in (*value.shape, *left.shape)),
            shape_class="large" if min(sizes[-3:]) >= 32 else "small",
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Product]:
    node: Any
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.bmm.default):
            yield Product(node, *node.args)
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
            if bias.meta["val"].dim() == 1 and _one_for_each_column(bias, node):
                yield Product(node, left, right, bias)


def _one_for_each_column(bias: fx.Node, node: fx.Node) -> bool:
    return same_sizes(bias.meta["val"].shape, node.meta["val"].shape[-1:])
