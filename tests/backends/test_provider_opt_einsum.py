"""The order of products in einsums of three or more tensors: numbers, report, training, and when
torch is left to itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_dispatch
from kernel_dispatch import devices
from lowering.providers import opt_einsum
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.reports import assert_ran_as_planned, fallbacks_of

HERE = opt_einsum.probe().available
installed = pytest.mark.skipif(not HERE, reason=opt_einsum.probe().reason)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def einsum_rows(compiled: Any) -> list[tuple[str, int, int]]:
    return [
        (row["provider"], row["count"], row["runs"])
        for graph in kernel_dispatch.report(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] == "einsum"
    ]


def chain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk,kl->il", a, b, c).relu() + 1


def operands(dtype: torch.dtype = torch.float32, **kwargs: Any) -> list[torch.Tensor]:
    sizes = ((96, 8), (8, 128), (128, 4))
    return [torch.randn(*size, dtype=dtype).requires_grad_(**kwargs) for size in sizes]


def hold(compiled: Any, fn: Callable[..., Any], args: list[torch.Tensor], where: str) -> None:
    wide = [a.to(torch.complex128 if a.is_complex() else torch.float64) for a in args]
    with torch.no_grad():
        assert_contract(compiled(*args), fn(*args), fn(*wide), where)


@installed
@LEVELS
def test_numbers_and_report(level: str) -> None:
    args = operands()
    compiled = compile_at(level, chain)
    for call in range(3):
        hold(compiled, chain, args, f"call {call}")
    assert_ran_as_planned(compiled, level)
    assert einsum_rows(compiled) == [("opt_einsum", 1, 3)]
    (graph,) = kernel_dispatch.report(compiled)
    (region,) = [region for region in graph.regions if region.name == "einsum"]
    left, best = 2 * 96 * 8 * 128 + 2 * 96 * 128 * 4, 2 * 8 * 128 * 4 + 2 * 96 * 8 * 4
    assert region.detail == f"ordered: {best / 1e6:.3g} MFLOP instead of {left / 1e6:.3g}"
    assert region.place.startswith(__file__)
    assert "region einsum x1: opt_einsum, ran 3 times" in graph.text()


@pytest.mark.sampled(2)
@installed
@LEVELS
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,jk,kl->bil", ((3, 96, 8), (8, 128), (128, 4))),
        ("...ij,jk,kl->...il", ((2, 3, 48, 8), (8, 128), (128, 4))),
        ("ij, jk, kl", ((96, 8), (8, 128), (128, 4))),
        ("iij,jk,kl->il", ((16, 16, 8), (8, 128), (128, 4))),
        ("ij,jk,kl,lm->im", ((64, 8), (8, 64), (64, 64), (64, 2))),
        ("ab,bc,cd,de,ef,fg->ag", ((32, 4), (4, 32), (32, 32), (32, 8), (8, 32), (32, 2))),
        ("bn,anm,bm->ba", ((64, 8), (16, 8, 12), (64, 12))),
        ("ijk,jl,km,lm->i", ((24, 16, 16), (16, 20), (16, 20), (20, 20))),
    ],
)
def test_equations(level: str, equation: str, shapes: Any) -> None:
    def fn(*args: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *args) * 2

    compiled = compile_at(level, fn)
    hold(compiled, fn, [torch.randn(shape) for shape in shapes], equation)
    assert not fallbacks_of(compiled)
    (taken,) = einsum_rows(compiled) or [None]
    unsaved = equation in ("bn,anm,bm->ba", "ijk,jl,km,lm->i")
    assert taken == ("opt_einsum", 1, 1) or unsaved


@installed
@LEVELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes(level: str, dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk,kl->il", a, b, c)

    compiled = compile_at(level, fn)
    hold(compiled, fn, operands(dtype), str(dtype))
    assert einsum_rows(compiled) == [("opt_einsum", 1, 1)]


@installed
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_training(level: str) -> None:
    compiled = compile_at(level, chain)
    args, twins = operands(requires_grad=True), None
    twins = [a.detach().clone().requires_grad_() for a in args]
    wide = [a.detach().double().requires_grad_() for a in args]
    for _ in range(2):
        for tensors in (args, twins, wide):
            for tensor in tensors:
                tensor.grad = None
        got, own, reference = compiled(*args), chain(*twins), chain(*wide)
        for out in (got, own, reference):
            out.square().sum().backward()
        assert_contract(got, own, reference, level)
        grads = [[t.grad for t in tensors] for tensors in (args, twins, wide)]
        assert_contract(*grads, f"gradients at {level}")
    assert einsum_rows(compiled) == [("opt_einsum", 1, 2)]
    assert not fallbacks_of(compiled)


@installed
@LEVELS
def test_several_einsums_in_one_graph(level: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        first = torch.einsum("ij,jk,kl->il", [a, b, c])
        return first + torch.einsum("kl,ij,jk->il", c, a, b) + torch.einsum("ij,jk->ik", a, b).sum()

    compiled = compile_at(level, fn)
    for _ in range(2):
        hold(compiled, fn, operands(), level)
    assert einsum_rows(compiled) == [("opt_einsum", 2, 4)]


@installed
@LEVELS
def test_sizes_that_change_are_left_to_torch(level: str) -> None:
    compiled = compile_at(level, chain, dynamic=True)
    hold(compiled, chain, operands(), level)
    assert einsum_rows(compiled) == []


@installed
@LEVELS
def test_what_saves_nothing_is_left_to_torch(level: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,ij,ij->i", a, b, c).relu()

    compiled = compile_at(level, fn)
    hold(compiled, fn, [torch.randn(8, 64) for _ in range(3)], level)
    assert einsum_rows(compiled) == []


@installed
@LEVELS
def test_disabled_and_half_and_autocast(level: str) -> None:
    without = compile_at(level, chain, options={"disable": ["opt_einsum"]})
    hold(without, chain, operands(), "disabled")
    assert einsum_rows(without) == []
    half = compile_at(level, chain)
    with torch.no_grad():
        torch.testing.assert_close(
            half(*operands(torch.float16)).isfinite().all(), torch.tensor(True)
        )
    assert einsum_rows(half) == []
    cast = compile_at(level, chain)
    args = operands()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cast(*args), chain(*args), rtol=0.05, atol=0.5)
    assert einsum_rows(cast) == []


@installed
def test_torch_was_told_not_to_order() -> None:
    with torch.backends.opt_einsum.flags(enabled=False):
        compiled = compile_at("O1", chain)
        hold(compiled, chain, operands(), "off")
    assert einsum_rows(compiled) == []


def test_o0_is_left_alone() -> None:
    args = operands()
    compiled = compile_at("O0", chain)
    with torch.no_grad():
        assert torch.equal(compiled(*args), chain(*args))
    assert einsum_rows(compiled) == []


@installed
@LEVELS
def test_a_failure_falls_back(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no order")

    monkeypatch.setattr(opt_einsum, "_path", fail)
    args, compiled = operands(), compile_at(level, chain)
    with torch.no_grad(), pytest.warns(kernel_dispatch.UnifiedWarning, match="compile-failed"):
        got = compiled(*args)
    torch.testing.assert_close(got, chain(*args))
    assert einsum_rows(compiled) == []


@LEVELS
def test_without_the_package(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own order, and no warning: nobody asked for the package."""
    monkeypatch.setitem(sys.modules, "opt_einsum", None)
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    devices.forget()
    try:
        found = opt_einsum.probe()
        assert (found.available, found.fix) == (False, "pip install opt_einsum")
        compiled = compile_at(level, chain)
        hold(compiled, chain, operands(), level)
        assert einsum_rows(compiled) == []
        assert not fallbacks_of(compiled)
    finally:
        devices.forget()
