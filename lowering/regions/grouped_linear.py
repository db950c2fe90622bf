"""The grouped_linear region: rows in groups, each of which goes through a layer of its own, as the
tokens of a mixture of experts do.

    rows[end of the group before : end] @ weight[group]        sorted by expert, and behind it
    act(of one half of the outputs) * the other half           or only the activation
    rows[i] @ weight[chosen[i]]                                each row by itself

Weights need not stay: nobody packs them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, only_user, same_sizes
from lowering.profile import gemm_shape
from lowering.regions.epilogue import NONE, Activation, activation_of
from lowering.regions.gathered_weights import Gathered, gathered
from lowering.regions.weights import Stays

aten = torch.ops.aten


class Gate(IntEnum):
    """Which half of the outputs is activated; as in native/grouped_linear.h."""

    NONE = 0
    FIRST = 1
    SECOND = 2


@dataclass(frozen=True)
class GroupedLinear:
    """`input` are rows, those of a group one after the other; of weights that were looked up, a
    batch of matrices that have one row."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node  # (group, out, in)
    ends: fx.Node | None = None  # the row behind each group's last one
    gathered: Gathered | None = None  # in place of the ends
    in_out: bool = False  # is the weight stored as (group, in, out)?
    gate: Gate = Gate.NONE
    activation: Activation = NONE

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def steps(self) -> list[str]:
        """What follows the product in it, for the report."""
        found = [] if self.activation.name == "none" else [self.activation.name]
        return [*found, "mul"] if self.gate is not Gate.NONE else found

    def work(self) -> Work:
        groups, *sizes = map(hint, self.weight.meta["val"].shape)
        rows = hint(self.input.meta["val"].shape[0])
        if self.gathered is not None:
            rows = math.prod(map(hint, self.gathered.chosen.meta["val"].shape))
        return Work(
            region="grouped_linear",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * rows * math.prod(sizes),
            dynamic=any(not isinstance(size, int) for size in self.node.meta["val"].shape),
            shape_class=gemm_shape(-(-rows // max(groups, 1))),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[GroupedLinear]:
    for node in list(graph.nodes):
        if (match := _of_groups(node)) is not None:
            yield _with_what_follows(match)
        elif (match := _of_gathered(node)) is not None:
            yield match


def _of_gathered(node: fx.Node) -> GroupedLinear | None:
    found = gathered(node)
    if found is None or not _is_in_one_piece(found.weight):
        return None
    return GroupedLinear(node, found.rows[0], found.weight, gathered=found, in_out=found.in_out)


def _of_groups(node: fx.Node) -> GroupedLinear | None:
    """torch's operator, or the one that transformers has for dtypes which torch's does not take."""
    names = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
    if str(node.target) not in names or any(v is not None for v in node.kwargs.values()):
        return None
    given: list[Any] = [*node.args, *[None] * 5]
    rows, right, ends, *others = given
    if ends is None or any(other is not None for other in others):
        return None
    x, matrices = rows.meta["val"], right.meta["val"]
    if x.dim() != 2 or matrices.dim() != 3 or x.dtype != matrices.dtype:
        return None
    plain = _last_two_exchanged(right)
    weight, in_out = (right, True) if plain is None else (plain, False)
    return (
        GroupedLinear(node, rows, weight, ends, in_out=in_out) if _is_in_one_piece(weight) else None
    )


def _last_two_exchanged(node: fx.Node) -> Any:
    """The tensor of which this is that view, or None."""
    is_view = (node.target is aten.permute.default and node.args[1] == [0, 2, 1]) or (
        node.target is aten.transpose.int and set(node.args[1:]) in ({1, 2}, {-1, -2})
    )
    return node.args[0] if is_view else None


def _is_in_one_piece(weight: fx.Node) -> bool:
    value = weight.meta["val"]
    _, first, second = value.shape
    return same_sizes(value.stride(), (first * second, second, 1))


# --- what follows a product -----------------------------------------------------------------------


def _with_what_follows(match: GroupedLinear) -> GroupedLinear:
    user = only_user(match.node)
    if user is not None and (activation := activation_of(user)) is not None:
        return replace(match, node=user, activation=activation)
    halves = _halves(match.node)
    if halves is None:
        return match
    for factor, other, gate in ((*halves, Gate.FIRST), (*halves[::-1], Gate.SECOND)):
        activated = only_user(factor)
        activation = None if activated is None else activation_of(activated)
        product = None if activated is None else only_user(activated)
        if activation is None or product is None or only_user(other) is not product:
            continue
        if product.target is aten.mul.Tensor and set(product.args) == {activated, other}:
            return replace(match, node=product, gate=gate, activation=activation)
    return match


def _halves(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two equal parts that a row is cut into, where nothing else reads the whole."""
    width = node.meta["val"].shape[1]
    if not isinstance(width, int) or width % 2:
        return None
    half = width // 2
    found = {_start(part, half): part for part in _parts(node)}
    if set(found) != {0, half} or len(_parts(node)) != 2:
        return None
    return found[0], found[half]


def _start(part: fx.Node, half: int) -> int | None:
    """Where in a row this half of it begins; None of anything else."""
    args: Any = part.args
    if part.target is operator.getitem:
        start = int(args[1]) * half
    elif part.target is aten.slice.Tensor and len(args) in (3, 4) and args[1] in (1, -1):
        start = args[2] or 0
    else:
        return None
    if not isinstance(start, int) or part.meta["val"].shape[1] != half:
        return None
    return start + 2 * half if start < 0 else start


def _parts(node: fx.Node) -> list[fx.Node]:
    split = only_user(node)
    if split is not None and split.target in (aten.split.Tensor, aten.split_with_sizes.default):
        along: Any = [*split.args[2:], *split.kwargs.values()] or [0]
        return list(split.users) if along in ([1], [-1]) else []
    return list(node.users)
