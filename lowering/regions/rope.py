"""The rope region: query and key turned by the same angles, x * cos + rotated(x) * sin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.norm import square_of
from lowering.regions.pairs import pairs_turned
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class HeadNorm:
    """An RMS norm over the head size that stands before the rotation."""

    input: fx.Node  # as the rotation wants it: (batch, heads, tokens, size), or `order` away
    weight: fx.Node
    eps: float
    order: tuple[int, ...]  # how the norm's result was permuted


@dataclass(frozen=True)
class Turned:
    """One tensor that is turned; `node` is the sum."""

    node: fx.Node
    input: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool = False  # pairs are neighbours, not half a head apart

    @property
    def norm(self) -> HeadNorm | None:
        return _norm_before(self.input)


@dataclass(frozen=True)
class Rope:
    """Query and key of one layer; `node` is the later of the two sums."""

    node: fx.Node
    query: Turned
    key: Turned

    @property
    def interleaved(self) -> bool:
        return self.query.interleaved

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        values = [turned.node.meta["val"] for turned in (self.query, self.key)]
        sizes = sum(math.prod(hint(size) for size in value.shape) for value in values)
        return Work(
            region="rope",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=3 * sizes,
            bytes_moved=2 * sizes * self.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for v in values for size in v.shape),
            shape_class="with head norm" if self._has_head_norms() else "plain",
        )

    def _has_head_norms(self) -> bool:
        """Both normed alike before, and angles whose two halves are one."""
        query, key = self.query.norm, self.key.norm
        alike = query is not None and key is not None and query.eps == key.eps
        alike = alike and not self.interleaved
        return alike and _repeats(self.query.cos) and _repeats(self.query.sin)


def find(graph: fx.Graph, stays: Stays) -> Iterator[Rope]:
    """Pairs that share their angles and lie next to each other, the first one for the query."""
    waiting: dict[tuple[fx.Node, fx.Node, bool], Turned] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        turned = _turned(node)
        if turned is None:
            continue
        angles = (turned.cos, turned.sin, turned.interleaved)
        first = waiting.pop(angles, None)
        if first is None:
            waiting[angles] = turned
        elif all(order[user] > order[node] for user in first.node.users):
            yield Rope(node, first, turned)


def _turned(node: fx.Node) -> Turned | None:
    if node.target is not aten.add.Tensor or len(node.args) != 2:
        return None
    for straight, across in (node.args, node.args[::-1]):
        for x, cos in _factors(straight):
            for rotated, sin in _factors(across):
                if not isinstance(x, fx.Node) or not isinstance(cos, fx.Node):
                    continue
                if _half_turned(rotated) is x:
                    return Turned(node, x, cos, sin)
                if pairs_turned(rotated) is x:
                    return Turned(node, x, cos, sin, interleaved=True)
    return None


def _factors(node: Any) -> list[tuple[Any, Any]]:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return []
    one, other = node.args
    return [(one, other), (other, one)]


def _half_turned(node: Any) -> Any:
    """x, where this is cat([-second half of x, first half of x])."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default:
        return None
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or dim not in (-1, node.meta["val"].dim() - 1):
        return None
    negated, first = parts
    if negated.target is not aten.neg.default or first.target is not aten.slice.Tensor:
        return None
    second: Any = negated.args[0]
    half = node.meta["val"].shape[-1] // 2
    if second.target is not aten.slice.Tensor or second.args[0] is not first.args[0]:
        return None
    halves = (second.args[2], first.args[2], first.args[3])
    return first.args[0] if halves == (half, 0, half) else None


def _repeats(angles: Any) -> bool:
    """Is the second half of the last dimension the first one again, by the way it was made?"""
    same_for_each = (
        aten.unsqueeze.default,
        aten.cos.default,
        aten.sin.default,
        aten.mul.Tensor,
        torch.ops.prims.convert_element_type.default,
    )
    while isinstance(angles, fx.Node) and angles.target in same_for_each:
        if angles.target is aten.mul.Tensor and isinstance(angles.args[1], fx.Node):
            return False
        angles = angles.args[0]
    if not isinstance(angles, fx.Node):
        return False
    if angles.target is aten.cat.default:
        parts: Any = angles.args[0]
        return len(parts) == 2 and parts[0] is parts[1]
    return angles.target in (aten.view.default, aten.reshape.default) and _is_expanded(angles)


def _is_expanded(view: fx.Node) -> bool:
    """How Inductor writes the cat of a tensor with itself: a dimension of two before the last."""
    copy: Any = view.args[0]
    expanded = copy.args[0] if copy.target is aten.clone.default else copy
    if expanded.target is not aten.expand.default:
        return False
    before, after = expanded.args[0].meta["val"].shape, expanded.meta["val"].shape
    twice = len(after) > 1 and (before[-2], after[-2]) == (1, 2)
    return twice and view.meta["val"].shape[-1] == 2 * after[-1]


def _norm_before(node: fx.Node) -> HeadNorm | None:
    """permute(weight * (x * rsqrt(mean(x * x) + eps))), with conversions in between."""
    if node.target is aten.permute.default:
        order, scaled = tuple(node.args[1]), node.args[0]  # type: ignore[arg-type]
    else:
        order, scaled = tuple(range(node.meta["val"].dim())), node
    for weight, normed in _factors(scaled):
        if not isinstance(weight, fx.Node) or weight.meta["val"].dim() != 1:
            continue
        for x, root in _factors(_unconverted(normed)):
            eps = _eps_of(root, x)
            if eps is not None:
                return HeadNorm(_unconverted(x), weight, eps, order)
    return None


def _eps_of(root: Any, x: Any) -> float | None:
    """The eps, where `root` is rsqrt(mean(x * x) + eps)."""
    if not isinstance(root, fx.Node) or root.target is not aten.rsqrt.default:
        return None
    shifted: Any = root.args[0]
    mean: Any = shifted.args[0]
    if shifted.target is not aten.add.Tensor or mean.target is not aten.mean.dim:
        return None
    return float(shifted.args[1]) if square_of(mean.args[0]) is x else None


def _unconverted(node: Any) -> Any:
    is_cast = (
        isinstance(node, fx.Node) and node.target is torch.ops.prims.convert_element_type.default
    )
    return node.args[0] if is_cast else node
