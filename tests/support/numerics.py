"""The numerics contract of the levels, in one place.

Levels O1 and O2 promise, for every floating output tensor,

    err(compiled) <= 2 * err(eager) + 4 * eps(dtype),    err(a) = max|a - ref| / max|ref|

where `ref` is the same computation in float64 (complex128), and the maxima run over the positions
at which all three are finite. NaN and infinities stand where eager has them. Integer and bool
outputs, structure, dtype and shape are eager's; strides are not part of the contract.
Level O0 promises more: every bit is eager's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernel_dispatch.numerics import EPS_FACTOR, Errors, is_inexact, measure

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_contract(candidate: Any, eager: Any, reference: Any, where: str) -> list[Errors]:
    """Raise AssertionError where `candidate` breaks the contract of O1 and O2.

    `reference` is the tree that the computation gives on `to_reference` inputs. Returns the errors
    of the inexact outputs, for tables.
    """
    outputs = _paired(candidate, eager, where)
    references = pytree.tree_leaves(reference)
    _demand(
        len(references) == len(outputs),
        f"{where}: the reference has {len(references)} outputs, eager has {len(outputs)}",
    )
    measured = []
    for (name, got, own), ref in zip(outputs, references, strict=True):
        label = f"{where}: output {name}"
        if isinstance(own, torch.Tensor):
            _assert_form(got, own, label)
            if own.numel():
                measured.extend(_check_tensor(got, own, ref, label))
        else:
            _check_scalar(got, own, label)
    return measured


def assert_bit_identical(candidate: Any, eager: Any, where: str) -> None:
    """Raise AssertionError unless every bit is eager's; all NaNs count as the same number."""
    for name, got, own in _paired(candidate, eager, where):
        label = f"{where}: output {name}"
        if not isinstance(own, torch.Tensor):
            same = got == own or (got != got and own != own)
            _demand(same, f"{label}: {got!r} is not {own!r}")
            continue
        _assert_form(got, own, label)
        if own.numel() == 0:
            continue
        got, own = _parts(got), _parts(own)
        same = _bits(got) == _bits(own)
        if own.is_floating_point():
            same |= torch.isnan(got) & torch.isnan(own)
        if not bool(same.all()):
            _report_first(label, "is not bit-identical to eager", same, got, own)


def assert_same_form(candidate: Any, eager: Any, where: str) -> None:
    """Structure, dtypes and shapes only: all that random and uninitialised values can promise."""
    for name, got, own in _paired(candidate, eager, where):
        _assert_form(got, own, f"{where}: output {name}")


def _paired(candidate: Any, eager: Any, where: str) -> Sequence[tuple[str, Any, Any]]:
    got, got_spec = pytree.tree_flatten(candidate)
    own, own_spec = pytree.tree_flatten_with_path(eager)
    _demand(
        got_spec == own_spec,
        f"{where}: the structure of the outputs is {got_spec}, eager's is {own_spec}",
    )
    return [
        (pytree.keystr(path) or "(the only one)", candidate_leaf, eager_leaf)
        for candidate_leaf, (path, eager_leaf) in zip(got, own, strict=True)
    ]


def _assert_form(got: Any, own: Any, label: str) -> None:
    if not isinstance(own, torch.Tensor):
        _demand(
            type(got) is type(own), f"{label}: {type(got).__name__}, eager {type(own).__name__}"
        )
        return
    _demand(isinstance(got, torch.Tensor), f"{label}: {type(got).__name__}, eager has a tensor")
    for what in ("dtype", "layout", "device", "shape"):
        mine, eagers = getattr(got, what), getattr(own, what)
        _demand(mine == eagers, f"{label}: {what} {mine}, eager has {eagers}")


def _check_tensor(
    got: torch.Tensor, own: torch.Tensor, ref: torch.Tensor, label: str
) -> list[Errors]:
    got, own = _parts(got, split=False), _parts(own, split=False)
    if not is_inexact(own):
        same = got == own
        if not bool(same.all()):
            _report_first(label, f"({own.dtype}) differs from eager", same, got, own)
        return []
    _demand(isinstance(ref, torch.Tensor), f"{label}: the reference is {type(ref).__name__}")
    ref = _parts(ref, split=False)
    _demand(
        ref.shape == own.shape, f"{label}: the reference has shape {ref.shape}, not {own.shape}"
    )
    _check_special_values(got, own, label)
    errors = measure(got, own, ref)
    if not errors.kept:
        at = errors.worst_index
        raise AssertionError(
            f"{label} ({own.dtype}, shape {tuple(own.shape)}) breaks the numerics contract: "
            f"err {errors.candidate:.3e} > 2 x eager's {errors.eager:.3e} + 4 eps "
            f"({errors.eps:.3e}) = {errors.bound:.3e}; worst at {at}: got {got[at].item()!r}, "
            f"eager {own[at].item()!r}, reference {ref[at].item()!r}"
        )
    return [errors]


def _check_special_values(got: torch.Tensor, own: torch.Tensor, label: str) -> None:
    got, own = _parts(got), _parts(own)
    special = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for name, find in special.items():
        same = find(got) == find(own)
        if not bool(same.all()):
            _report_first(label, f"has {name} elsewhere than eager", same, got, own)


def _check_scalar(got: Any, own: Any, label: str) -> None:
    """A Python number: floats to within float32's rounding, the rest exactly."""
    _assert_form(got, own, label)
    if isinstance(own, (float, complex)) and not isinstance(own, bool):
        for mine, eagers in zip(_reals(got), _reals(own), strict=True):
            near = math.isclose(mine, eagers, rel_tol=EPS_FACTOR * torch.finfo(torch.float32).eps)
            _demand(near or (mine != mine and eagers != eagers), f"{label}: {got!r}, not {own!r}")
        return
    _demand(got == own, f"{label}: {got!r}, eager has {own!r}")


def _report_first(
    label: str, what: str, same: torch.Tensor, got: torch.Tensor, own: torch.Tensor
) -> None:
    wrong = torch.nonzero(~same)
    at = tuple(int(i) for i in wrong[0])
    raise AssertionError(
        f"{label} {what} at {len(wrong)} of {same.numel()} positions, first at {at}: "
        f"got {got[at].item()!r}, eager {own[at].item()!r}"
    )


def _parts(tensor: torch.Tensor, *, split: bool = True) -> torch.Tensor:
    """A plain dense tensor; with `split` a complex one as its real and imaginary parts."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if split and plain.is_complex() else plain


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _reals(number: complex) -> tuple[float, float]:
    return complex(number).real, complex(number).imag


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
