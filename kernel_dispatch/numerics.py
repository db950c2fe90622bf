"""How far an output is from the truth: errors against float64, and the bound of O1 and O2.

    err(compiled) <= 2 * err(eager) + 4 * eps(dtype),    err(a) = max|a - ref| / max|ref|

where `ref` is the same computation in float64 (complex128), and the maxima run over the positions
at which all three are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

EAGER_FACTOR = 2.0
EPS_FACTOR = 4.0


@dataclass(frozen=True)
class Errors:
    """One output's two errors against the reference, and the bound that follows from eager's."""

    candidate: float
    eager: float
    eps: float
    worst_index: tuple[int, ...]

    @property
    def bound(self) -> float:
        return EAGER_FACTOR * self.eager + EPS_FACTOR * self.eps

    @property
    def kept(self) -> bool:
        return self.candidate <= self.bound


@dataclass(frozen=True)
class Distance:
    """The largest error of one tensor, as it is and over the largest value of the reference."""

    absolute: float
    relative: float
    worst_index: tuple[int, ...]


def distance(got: torch.Tensor, reference: torch.Tensor) -> Distance:
    """How far two equally shaped tensors are apart, which may live on different devices.

    A NaN or an infinity that only one of them has, or of another sign, is infinitely far off.
    """
    one, ref = (_widened(tensor).cpu() for tensor in (got, reference))
    if one.shape != ref.shape:
        raise ValueError(f"shapes differ: {list(one.shape)} and {list(ref.shape)}")
    if not ref.numel():
        return Distance(0.0, 0.0, ())
    both = torch.isfinite(one) & torch.isfinite(ref)
    same = both | (one == ref) | (torch.isnan(one) & torch.isnan(ref))
    off = torch.where(both, (one - ref).abs(), torch.where(same, 0.0, math.inf))
    worst, scale = int(off.argmax()), torch.where(both, ref.abs(), 0.0).max().item() or 1.0
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape))
    return Distance(off.max().item(), off.max().item() / scale, index)


def is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def to_reference(tree: Any) -> Any:
    """The same tree in float64 and complex128: tensors, and floating dtypes given as values."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and is_inexact(leaf):
            wide = leaf.detach().to(_wide(leaf.dtype))
            return wide.requires_grad_(leaf.requires_grad)
        return _wide_dtype(leaf)

    return pytree.tree_map(convert, tree)


@contextmanager
def double_by_default() -> Iterator[None]:
    """Integers promote to float64, and factories without a dtype give it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def all_in_double() -> Iterator[None]:
    """For the reference run of a whole model: casts to float32 inside of it stay in float64."""
    with double_by_default(), _WideCasts():
        yield


class _WideCasts(TorchFunctionMode):
    _CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._CASTS:
            return args[0].double()
        args, kwargs = pytree.tree_map(_wide_dtype, (args, kwargs or {}))
        return func(*args, **kwargs)


def measure(candidate: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> Errors:
    """The errors of two equally shaped inexact tensors against their reference."""
    got, own, ref = (_widened(tensor) for tensor in (candidate, eager, reference))
    eps = torch.finfo(eager.dtype).eps
    finite = torch.isfinite(got) & torch.isfinite(own) & torch.isfinite(ref)
    if not bool(finite.any()):
        return Errors(0.0, 0.0, eps, ())
    zero = torch.zeros((), dtype=torch.float64)
    scale = torch.where(finite, ref.abs(), zero).max().item() or 1.0
    off = torch.where(finite, (got - ref).abs(), zero)
    worst = int(off.argmax())
    own_error = torch.where(finite, (own - ref).abs(), zero).max().item() / scale
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape))
    return Errors(off.max().item() / scale, own_error, eps, index)


def _wide_dtype(leaf: Any) -> Any:
    """A floating dtype, given as a value, in its wide form; everything else as it is."""
    if isinstance(leaf, torch.dtype) and (leaf.is_floating_point or leaf.is_complex):
        return _wide(leaf)
    return leaf


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_wide(tensor.dtype))
