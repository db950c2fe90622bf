"""A sum of equal numbers is one of them, times their count: the gradient of a bias behind a mean.

What a mean hands back is the same for each token or pixel. Added up one by one the rounding of each
step has the same sign, and 256 numbers are off by more than the contract allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from lowering.outputs import is_pointwise

aten = torch.ops.aten
_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_FAR = 50  # operators before the sum that are looked at


def are_equal(node: fx.Node, dims: Set[int]) -> bool:
    """Is every number of this node the same along these dimensions, as far as one can see?"""
    return _Search().are_equal(node, frozenset(dims), 0)


class _Search:
    """What was found out of the nodes before a sum: several ways may lead to one of them."""

    def __init__(self) -> None:
        self.known: dict[tuple[fx.Node, frozenset[int]], bool] = {}

    def are_equal(self, node: Any, dims: frozenset[int], far: int) -> bool:
        key = (node, dims)
        if key not in self.known:
            self.known[key] = far < _FAR and self._find(node, dims, far + 1)
        return self.known[key]

    def _find(self, node: Any, dims: frozenset[int], far: int) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(map(_is_counted, value.shape)):
            return False
        along = frozenset(dim for dim in dims if value.shape[dim] != 1)
        if not along or node.target is aten.full.default:
            return True
        if node.target is aten.permute.default:
            turned = frozenset(node.args[1][dim] % value.dim() for dim in along)
            return self.are_equal(node.args[0], turned, far)
        if node.target in _RESHAPES:
            before = _before_reshape(node.args[0].meta["val"].shape, value.shape, along)
            return before is not None and self.are_equal(node.args[0], before, far)
        if node.target is not aten.expand.default and not is_pointwise(node):
            return False
        return all(
            self.are_equal(one, _counted_from_the_last(one, value, along), far)
            for one in node.all_input_nodes
        )


def _is_counted(size: Any) -> bool:
    return isinstance(size, int) and size > 0


def _counted_from_the_last(
    given: fx.Node, result: torch.Tensor, dims: frozenset[int]
) -> frozenset[int]:
    """Dimensions of what is broadcast."""
    value = given.meta.get("val")
    missing = result.dim() - value.dim() if isinstance(value, torch.Tensor) else 0
    return frozenset(dim - missing for dim in dims if dim >= missing)


def _before_reshape(
    before: Sequence[int], after: Sequence[int], along: frozenset[int]
) -> frozenset[int] | None:
    """The dimensions that those of the result were made of, if of these alone."""
    given = [dim for dim, size in enumerate(before) if size != 1]
    made = [dim for dim, size in enumerate(after) if size != 1]
    found: set[int] = set()
    while made:
        of, into = [given.pop(0)], [made.pop(0)]
        while (left := _numbers(before, of)) != (right := _numbers(after, into)):
            if left < right:
                of.append(given.pop(0))
            else:
                into.append(made.pop(0))
        if not along.isdisjoint(into):
            if not along.issuperset(into):
                return None
            found.update(of)
    return frozenset(found)


def _numbers(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)
