"""The random region: numbers that a compiled graph draws, for dropout, noise and sampling.

Inductor draws each of them alone: its generator makes four at a time, of which three are thrown
away. Dropout took longer in its code than in eager.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.weights import Stays


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform in [0, 1) or normal ones, from a seed that the graph drew of torch's generator."""

    node: fx.Node
    size: Sequence[Any]
    seed: fx.Node
    normal: bool

    def work(self) -> Work:
        value = self.node.meta["val"]
        return Work(
            region="random",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            bytes_moved=math.prod(hint(size) for size in value.shape) * value.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[RandomNumbers]:
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.prims.inductor_random.default
    ):
        size, seed, kind = node.args
        value = node.meta["val"]
        plain = value.dtype is torch.float32 and not node.kwargs
        if plain and value.device.type == "cpu" and kind in ("rand", "randn"):
            yield RandomNumbers(node, size, seed, kind == "randn")
