"""Reductions over a few neighbours are written out, and give what eager gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "greatest": lambda x: x.amax(-1),
    "least": lambda x: x.amin(-1),
    "product": lambda x: x.prod(-1),
    "any": lambda x: x.any(-1),
    "place of the greatest": lambda x: x.argmax(-1),
    "place of the least": lambda x: x.argmin(-1),
    "greatest with its place": lambda x: torch.stack([part.long() for part in x.max(-1)]),
    "share": lambda x: x / (x.abs().sum(-1, keepdim=True) + 1),
    "distance": lambda x: x - x.amax(-1, keepdim=True),
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Some are equal, so that places are not a matter of course."""
    high = 5 if dtype in WHOLE else 4
    return torch.randint(0, high, (300, count)).to(dtype)


def of_each(kind: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Rows of every length and dtype in one graph, each in a loop of its own."""
    return lambda given: {case: KINDS[kind](x) for case, x in given.items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_of_short_rows(kind: str) -> None:
    counts = (7, 8, 13, 32, 33, 100, 130)
    given = {f"{n} {dtype}": numbers(n, dtype) for dtype in WHOLE for n in counts}
    function, compiled = of_each(kind), compile_at("O2", of_each(kind))
    with torch.no_grad():
        got, own = compiled(given), function(given)
    for case in given:
        assert got[case].dtype == own[case].dtype, case
        torch.testing.assert_close(got[case], own[case], msg=lambda text, c=case: f"{c} {text}")
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_floats_of_short_rows(kind: str) -> None:
    counts = (7, 8, 9, 32, 33)
    given = {f"{n} {dtype}": numbers(n, dtype) for dtype in FLOATS for n in counts}
    wide = {case: x.double() for case, x in given.items()}
    function, compiled = of_each(kind), compile_at("O2", of_each(kind))
    with torch.no_grad():
        assert_contract(compiled(given), function(given), function(wide), kind)
    assert_ran_as_planned(compiled, "O2")


def test_what_is_not_a_number_is_the_greatest() -> None:
    x = torch.randn(400, 8)
    x[::3, 5], x[::5, 2], x[::7, 1] = torch.nan, torch.inf, torch.nan
    for function in (
        KINDS["place of the greatest"],
        KINDS["place of the least"],
        KINDS["greatest"],
    ):
        compiled = compile_at("O2", function)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)
        assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("place of the greatest", torch.float32, 32),
        ("sum", torch.int64, 32),
        ("sum", torch.float32, 8),
    ],
)
def test_there_is_no_loop_over_them(kind: str, dtype: torch.dtype, count: int) -> None:
    with torch.no_grad():
        _, (code,) = run_and_get_code(compile_at("O2", KINDS[kind]), numbers(count, dtype))
        _, (other,) = run_and_get_code(compile_at("O2", KINDS[kind]), numbers(33, dtype).float())
    assert "tmp_acc" not in code
    assert "tmp_acc" in other


def test_rows_across_memory_stay_loops() -> None:
    x = torch.randn(50, 16, 64)
    compiled = compile_at("O2", lambda x: x.argmax(1))
    got, (code,) = run_and_get_code(compiled, x)
    assert torch.equal(got, x.argmax(1))
    assert "tmp_acc" in code


def test_sizes_that_change() -> None:
    compiled = compile_at("O2", KINDS["place of the greatest"], dynamic=True)
    for shape in ((300, 8), (200, 9), (100, 60)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), x.argmax(-1))
    assert_ran_as_planned(compiled, "O2")


def test_gradients_of_a_share() -> None:
    x = torch.randn(300, 8, requires_grad=True)
    compiled = compile_at("O2", KINDS["share"])
    double = x.detach().double().requires_grad_()
    got, own, exact = (
        torch.autograd.grad(one(where).square().sum(), where)
        for one, where in ((compiled, x), (KINDS["share"], x), (KINDS["share"], double))
    )
    assert_contract(got, own, exact, "torch.float32")
