"""Where the valid positions of a padded tensor are.

A dimension is a tuple of factors, outermost first: constants, and *extents* that were padded at
their end. `view(B, s0, H) -> (B * s0, H)` has a first dimension with the factors (B, s0): of each
run of a bucket's length the first s0 positions are valid. A dimension of size one has no factors.

In a bucket every dimension is as long as its true size's expression says for the bucket's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowering.bucketing.expressions import (
    Expr,
    Integer,
    common_divisor,
    divides,
    grows,
    product,
    quotient,
    same,
    shape_of,
)
from lowering.bucketing.refused import Refused

Dim = tuple[Expr, ...]


@dataclass(frozen=True)
class Padded:
    """A tensor of the bucket's shape, and which of its positions are valid."""

    tensor: torch.Tensor
    dims: tuple[Dim, ...]


def is_static(dim: Dim) -> bool:
    return all(factor.is_Integer for factor in dim)


def is_prefix(dim: Dim) -> bool:
    """Are the valid positions the first ones?"""
    return len(dim) <= 1


def dim_of(size: Expr) -> Dim:
    """A dimension that is padded at its end."""
    if not grows(size):
        raise Refused(f"a size of {size} may be smaller in a larger bucket")
    return () if size == 1 else (size,)


def dims_of(value: torch.Tensor) -> tuple[Dim, ...]:
    return tuple(dim_of(size) for size in shape_of(value))


def size_of(dim: Dim) -> Expr:
    return product(dim)


def joined(factors: Sequence[Expr]) -> Dim:
    """Neighbouring constants are one, and ones are none, so that equal dimensions look equal."""
    result: list[Expr] = []
    for factor in factors:
        if factor == 1:
            continue
        if result and factor.is_Integer and result[-1].is_Integer:
            result[-1] *= factor
        else:
            result.append(factor)
    return tuple(result)


def broadcast(shape: Sequence[Expr], operands: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The dimensions of a pointwise result. Operands must agree on which positions are valid."""
    result: list[Dim] = []
    for back in range(len(shape), 0, -1):
        given = {dims[-back] for dims in operands if len(dims) >= back} - {()}
        if len(given) > 1:
            raise Refused(f"operands are padded differently along a dimension of {shape[-back]}")
        result.append(given.pop() if given else dim_of(shape[-back]))
    return tuple(result)


def regrouped(dims: Sequence[Dim], shape: Sequence[Expr]) -> tuple[Dim, ...]:
    """The factors of a tensor, in order, dealt out to the dimensions that a reshape makes of it."""
    left = list(joined([factor for dim in dims for factor in dim]))
    result: list[Dim] = []
    for size in shape:
        taken: list[Expr] = []
        while not same(size, Integer(1)):
            if not left:
                raise Refused(f"no factors are left for a dimension of {size}")
            whole, rest = _taken(left.pop(0), size)
            if rest is not None:
                left.insert(0, rest)
            taken.append(whole)
            size = quotient(size, whole)
        result.append(joined(taken))
    if left:
        raise Refused(f"a reshape to {list(shape)} splits a padded dimension")
    return tuple(result)


def _taken(factor: Expr, size: Expr) -> tuple[Expr, Expr | None]:
    """What of a factor belongs to a dimension of that size, and what is left for the next one."""
    if divides(factor, size):
        return factor, None
    if factor.is_Integer and (common := common_divisor(factor, size)) > 1:
        return Integer(common), factor // common
    # An extent of 2k whose positions are read as (k, 2): those of the first k pairs are valid.
    if not factor.is_Integer and not size.is_Integer and grows(size):
        rest = quotient(factor, size)
        if rest.is_Integer and rest > 1:
            return size, rest
    raise Refused(f"it splits a dimension of {factor} to make one of {size}")
