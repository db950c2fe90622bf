"""The linear region: `x @ weight.T (+ bias)` with a weight that stays, and what may follow it.

Hand-written modules match as well as nn.Linear, because both have become mm or addmm here. So do
weights that are stored the other way round, for `x @ weight`, as GPT-2 has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, same_sizes
from lowering.profile import gemm_shape
from lowering.regions.weights import Stays, transposed_from, under_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """One match. `input` has any number of dimensions; `node` is the output of the same rank."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node  # a graph input that does not change from call to call
    bias: fx.Node | None
    in_out: bool = False  # is the weight stored as (in, out)? else as (out, in)

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def rows(self) -> int:
        return math.prod(hint(size) for size in self.input.meta["val"].shape[:-1])

    @property
    def sizes(self) -> tuple[int, int]:
        """How many values a row has before and after."""
        first, second = self.weight.meta["val"].shape
        return (first, second) if self.in_out else (second, first)

    def work(self) -> Work:
        weight = self.weight.meta["val"]
        return Work(
            region="linear",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * self.rows * weight.numel(),
            dynamic=any(not isinstance(size, int) for size in self.node.meta["val"].shape),
            shape_class=gemm_shape(self.rows),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Linear]:
    """Matches whose weight is one of the inputs that stay."""
    left: Any
    right: Any
    bias: Any
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            left, right, bias = node.args[0], node.args[1], None
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
        else:
            continue
        weight, bias = _weight_of(right), under_cast(bias)
        in_out = weight is None
        weight = under_cast(right) if in_out else weight
        if weight not in stays or not stays.or_none(bias):
            continue
        if bias is None or same_sizes(bias.meta["val"].shape, node.meta["val"].shape[-1:]):
            yield _with_bias(_in_full_rank(Linear(node, left, weight, bias, in_out)))


def _weight_of(right: fx.Node) -> Any:
    """The (out, in) matrix whose transpose this is, or None. Its conversion stands before the
    transpose or behind it."""
    plain = transposed_from(right)
    return under_cast(plain) if plain is not None else transposed_from(under_cast(right))


def _in_full_rank(match: Linear) -> Linear:
    """Without the flattening to a matrix before it and the view back behind it."""
    flattened: Any = match.input
    user: Any = next(iter(match.node.users), None)
    if not _is_view(flattened) or len(match.node.users) != 1 or not _is_view(user):
        return match
    full = flattened.args[0]
    before, after = full.meta["val"], user.meta["val"]
    inner, outer = match.sizes
    if not before.dim() or not same_sizes(before.shape, (*after.shape[:-1], inner)):
        return match
    if not same_sizes(after.shape[-1:], (outer,)):
        return match
    return replace(match, node=user, input=full)


def _is_view(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target in (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
    )


def _with_bias(match: Linear) -> Linear:
    """With the bias that is added in a step of its own: `x @ weight.t() + bias`."""
    user: Any = next(iter(match.node.users), None)
    if match.bias is not None or len(match.node.users) != 1 or user.target is not aten.add.Tensor:
        return match
    other = next((arg for arg in user.args if arg is not match.node), None)
    if user.kwargs or not isinstance(other, fx.Node):
        return match
    value, bias, sum_ = (node.meta["val"] for node in (match.node, other, user))
    same = value.dtype == bias.dtype == sum_.dtype and same_sizes(value.shape, sum_.shape)
    if not same or not same_sizes(bias.shape, value.shape[-1:]):
        return match
    return replace(match, node=user, bias=other)
