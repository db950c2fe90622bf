"""The norm region: RMS norm and LayerNorm over the last dimension, however they were spelled."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.weights import Stays

aten = torch.ops.aten
_FEW = 64  # rows of a step of decoding, where latency counts and not bandwidth


@dataclass(frozen=True)
class Norm:
    """`node` is the reciprocal root that every norm has, or torch's own operator."""

    node: fx.Node
    input: fx.Node
    kind: str  # "rms" or "layer"

    @property
    def dtype(self) -> torch.dtype:
        return self.input.meta["val"].dtype

    def work(self) -> Work:
        value = self.input.meta["val"]
        sizes = [hint(size) for size in value.shape]
        return Work(
            region="norm",
            dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=4 * math.prod(sizes),
            bytes_moved=2 * math.prod(sizes) * value.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in value.shape),
            shape_class="few rows" if math.prod(sizes[:-1]) <= _FEW else "many rows",
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Norm]:
    for node in list(graph.nodes):
        if node.target is aten.native_layer_norm.default:
            yield Norm(node, node.args[0], "layer")
        elif node.target is aten.rsqrt.default:
            found = _of_root(node)
            if found is not None:
                yield found


def _of_root(node: fx.Node) -> Norm | None:
    """rsqrt(mean(x * x) + eps), or rsqrt(var(x) + eps)."""
    shifted: Any = node.args[0]
    adds = (aten.add.Tensor, aten.add.Scalar)  # the second as torch.nn.RMSNorm has it
    if not isinstance(shifted, fx.Node) or shifted.target not in adds:
        return None
    statistic: Any = shifted.args[0]
    if not isinstance(statistic, fx.Node):
        return None
    if statistic.target is aten.mean.dim and _is_last(statistic):
        squared = square_of(statistic.args[0])
        return None if squared is None else Norm(node, _unconverted(squared), "rms")
    if statistic.target is operator.getitem and statistic.args[1] == 0:
        both: Any = statistic.args[0]
        if both.target is aten.var_mean.correction and _is_last(both):
            return Norm(node, _unconverted(both.args[0]), "layer")
    return None


def square_of(node: Any) -> Any:
    """The tensor whose square this is, or None."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return node.args[0]
    is_product = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return node.args[0] if is_product else None


def _is_last(node: fx.Node) -> bool:
    dims: Any = node.args[1]
    last = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    return list(dims) in ([-1], [last])


def _unconverted(node: fx.Node) -> fx.Node:
    below: Any = (
        node.args[0] if node.target is torch.ops.prims.convert_element_type.default else node
    )
    return below
