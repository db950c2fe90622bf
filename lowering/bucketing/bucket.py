"""One bucket: the sizes that everything has in it, and the true lengths as tensors.

What rules are written with. All of it is plain torch on tensors of fixed sizes, so it can be run as
it stands or be traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lowering.bucketing import neutral
from lowering.bucketing.expressions import Expr, Symbol, as_tensor, evaluate
from lowering.bucketing.layout import Dim, Padded, is_prefix, is_static, size_of
from lowering.bucketing.refused import Refused


class Bucket:
    def __init__(self, sizes: Mapping[Symbol, int], lengths: Mapping[Symbol, torch.Tensor]) -> None:
        self._sizes = sizes
        self._lengths = lengths
        self._valid: dict[tuple[Dim, torch.device], torch.Tensor] = {}

    def size(self, expr: Expr) -> int:
        """How long that is in this bucket."""
        return evaluate(expr, self._sizes)

    def shape(self, sizes: Iterable[Expr]) -> list[int]:
        return [self.size(size) for size in sizes]

    def true(self, expr: Expr) -> Any:
        """What it truly is: a 0-d tensor, or a number where no symbol is in it."""
        return as_tensor(expr, self._lengths)

    def filled(
        self, operator: str, operand: int, x: Padded, dims: Iterable[int], given: Any = None
    ) -> torch.Tensor:
        """`x` with the operator's neutral element wherever it was padded along these dimensions."""
        valid = self._valid_along(x, dims)
        if valid is None:
            return x.tensor
        kind = neutral.NEUTRAL[operator][operand]
        value = given if kind is neutral.GIVEN else neutral.value_of(kind, x.tensor.dtype)
        return x.tensor.masked_fill(~valid, value)

    def _valid_along(self, x: Padded, dims: Iterable[int]) -> torch.Tensor | None:
        """True where a position is valid, in a shape that broadcasts to x's; None: everywhere."""
        found = None
        for index in dims:
            if is_static(x.dims[index]):
                continue
            one = self._valid_in(x.dims[index], x.tensor.device)
            after = x.tensor.ndim - 1 - index % x.tensor.ndim
            one = one.reshape([-1] + [1] * after)
            found = one if found is None else found & one
        return found

    def _valid_in(self, dim: Dim, device: torch.device) -> torch.Tensor:
        key = (dim, device)
        if key not in self._valid:
            lengths = [self.size(factor) for factor in dim]
            position = torch.arange(math.prod(lengths), device=device)
            found = None
            for place, factor in enumerate(dim):
                if factor.is_Integer:
                    continue
                inside = position
                if place + 1 < len(dim):
                    inside = inside // math.prod(lengths[place + 1 :])
                if place:
                    inside = inside % lengths[place]
                one = inside < self.true(factor)
                found = one if found is None else found & one
            assert found is not None
            self._valid[key] = found
        return self._valid[key]

    def picked(self, x: Padded, dim: int, positions: torch.Tensor) -> torch.Tensor:
        """`x` at computed positions; those that are read for padding may be anywhere."""
        last = x.tensor.shape[dim] - 1
        return x.tensor.index_select(dim, positions.clamp(0, last))

    def positions(self, size: Expr, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.size(size), device=like.device)

    def from_start(self, x: Padded, dim: int, position: torch.Tensor) -> torch.Tensor:
        """Positions as Python counts them, negative ones from the true end, as counted from 0."""
        require_prefix(x, dim)
        end = self.true(size_of(x.dims[dim]))
        return torch.where(position < 0, position + end, position)


def require_prefix(x: Padded, dim: int) -> None:
    if not is_prefix(x.dims[dim]):
        raise Refused("it looks at positions along a dimension that was merged from padded ones")


def require_static(x: Padded, dims: Iterable[int]) -> None:
    for dim in dims:
        if not is_static(x.dims[dim]):
            raise Refused(f"it mixes along a dimension of {size_of(x.dims[dim])}, which is padded")
