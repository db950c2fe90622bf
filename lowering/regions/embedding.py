"""The embedding region: rows of a table that are looked up by number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class Embedding:
    node: fx.Node

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        value: Any = self.node.meta["val"]
        size = math.prod(hint(size) for size in value.shape)
        return Work(
            region="embedding",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            bytes_moved=2 * size * self.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Embedding]:
    for node in list(graph.nodes):
        if node.target is aten.embedding.default:
            yield Embedding(node)
