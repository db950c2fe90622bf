"""Conversions between dtypes, alone and within a loop, give every bit of eager's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from lowering import by_torch
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def numbers(dtype: torch.dtype) -> Tensor:
    """All of them fit every dtype, and need rounding where it has few digits."""
    high = 120 if dtype in (torch.int8, torch.uint8) else 30000
    x = torch.randint(0, high, (3000,)).double()
    return (x / 240 if dtype.is_floating_point else x).to(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_every_bit_is_eagers(given: torch.dtype) -> None:
    x = numbers(given)

    def each(x: Tensor) -> list[Tensor]:
        return [x.to(wanted) for wanted in DTYPES if wanted != given]

    compiled = compile_at("O2", each)
    with torch.no_grad():
        for got, own in zip(compiled(x), each(x), strict=True):
            assert got.dtype == own.dtype
            assert torch.equal(got, own), own.dtype
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_within_a_loop(given: torch.dtype) -> None:
    """To every dtype, each in a loop of its own, where one of both is short."""
    short = {torch.bfloat16, torch.float16, torch.int16}
    wanted = [one for one in DTYPES if one != given and {one, given} & short]

    def function(copies: list[Tensor]) -> dict[str, Tensor]:
        pairs = zip(wanted, copies, strict=True)
        return {f"{dtype}": (x + 1).to(dtype) + 1 for dtype, x in pairs}

    copies = [numbers(given) for _ in wanted]
    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, own = compiled(copies), function(copies)
    for dtype in wanted:
        name = f"{dtype}"
        assert got[name].dtype == own[name].dtype == dtype
        # A loop does not round `x + 1` to halves before it is converted.
        rtol, atol = (
            (0.01, 0.02 if dtype.is_floating_point else 1) if given.is_floating_point else (0, 0)
        )
        torch.testing.assert_close(
            {name: got[name].double()}, {name: own[name].double()}, rtol=rtol, atol=atol
        )
    assert_ran_as_planned(compiled, "O2")


def test_halves_become_integers_and_back_by_torch() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(torch.int32), x.to(torch.int32).to(torch.float16)

    x = numbers(torch.bfloat16)
    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, x)
    assert code.count("kernel_dispatch.convert.default(") >= 2
    for one, own in zip(got, function(x), strict=True):
        assert one.dtype == own.dtype
        assert torch.equal(one, own)


def test_sound_of_short_numbers() -> None:
    """What a recording becomes before a model sees it."""
    sound = torch.randint(-(2**15), 2**15, (4, 4000), dtype=torch.int16)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x / 32768, (x.clamp(-1000, 1000) * 2 + x.abs()).amax(-1), x > 100

    compiled = compile_at("O2", function)
    with torch.no_grad():
        for got, own in zip(compiled(sound), function(sound), strict=True):
            assert got.dtype == own.dtype
            torch.testing.assert_close(got, own, rtol=1e-6, atol=0)
    assert_ran_as_planned(compiled, "O2")


def test_no_operator_is_made_while_a_graph_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes the graph out of a cache makes none."""
    import lowering.providers.inductor  # noqa: F401  what is registered is registered by that

    def refuse(operator: object) -> None:
        raise AssertionError(f"{operator} is made too late")

    monkeypatch.setattr(by_torch, "whole", refuse)
    sound = torch.randint(-100, 100, (4, 4000), dtype=torch.int16)

    def function(x: Tensor) -> Tensor:
        return ((x * 2 + 1 - x) & 7).roll(1, -1).flip(-1)

    compiled = compile_at("O2", function)
    with torch.no_grad():
        assert torch.equal(compiled(sound), function(sound))
    assert_ran_as_planned(compiled, "O2")


def test_a_few_are_converted_in_the_loop() -> None:
    compiled = compile_at("O2", lambda x: x.to(torch.int32) + 1)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, numbers(torch.bfloat16)[:100])
    assert "kernel_dispatch.convert" not in code
