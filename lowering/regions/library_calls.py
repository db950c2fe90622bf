"""Convolutions and lookups where Dynamo sees them: for targets that leave them to a library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.calls import dtype_name, name_of, value_of

_CONVOLUTIONS = {f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3)}


@dataclass(frozen=True)
class LibraryCall:
    node: fx.Node
    region: str
    absorbed: Sequence[fx.Node] = ()

    def work(self) -> Work:
        value = value_of(self.node)
        size = math.prod(hint(size) for size in value.shape)
        return Work(
            region=self.region,
            dtypes=frozenset({dtype_name(value)}),
            op_count=1,
            bytes_moved=2 * size * value.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find_convolutions(graph: fx.Graph) -> Iterator[LibraryCall]:
    for node in list(graph.nodes):
        if name_of(node) in _CONVOLUTIONS and value_of(node) is not None:
            yield LibraryCall(node, "convolution")


def find_embeddings(graph: fx.Graph) -> Iterator[LibraryCall]:
    for node in list(graph.nodes):
        if name_of(node) == "embedding" and value_of(node) is not None:
            yield LibraryCall(node, "embedding")
