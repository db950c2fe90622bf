"""Functions that generated code computes by formulas of ours: the numbers over the whole range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lowering import elementary, machine
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def everywhere() -> Tensor:
    """Every size of a float, both signs, and densely around where the formula changes."""
    powers = torch.logspace(-44, 38, 40001)
    dense = torch.linspace(-12, 12, 240001)
    odd = torch.tensor([0.0, -0.0, INF, -INF, NAN])
    return torch.cat([powers, -powers, dense, odd])


def test_tanh_is_within_three_units_in_the_last_place() -> None:
    compiled, x = compile_at("O2", lambda x: torch.tanh(x)), everywhere()
    got, exact = compiled(x), torch.tanh(x.double())
    assert got.isnan().equal(x.isnan())
    known = ~x.isnan() & (exact.abs() > 1e-37)  # denormal numbers have fewer bits
    units = (got.double() - exact).abs() / exact.abs() / 2**-23
    assert units[known].max() < 3
    assert got.abs().nan_to_num().max() <= 1
    assert compiled(-x).nan_to_num().equal(-got.nan_to_num())
    assert_ran_as_planned(compiled, "O2")


# Each with the units in the last place that it may be off by, over all floats.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "expm1": (torch.expm1, 4),
    "atanh": (torch.atanh, 4),
    "acosh": (torch.acosh, 4),
    "asinh": (torch.asinh, 4),
    "erf": (torch.erf, 5),
    "elu": (functional.elu, 4),
    "celu": (functional.celu, 4),
    "selu": (functional.selu, 5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_is_lost_near_zero(dtype: torch.dtype) -> None:
    """Of all functions, each in a loop of its own."""

    def each(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: FUNCTIONS[name][0](x) * 1.0 for name, x in given.items()}

    compiled = compile_at("O2", each)
    results = compiled({name: everywhere().to(dtype) for name in FUNCTIONS})
    x = everywhere().to(dtype)
    for name, (function, units) in FUNCTIONS.items():
        got, own, exact = results[name], function(x), function(x.double())
        strange = ~own.isfinite()
        torch.testing.assert_close({name: got[strange]}, {name: own[strange]}, equal_nan=True)
        known = ~strange & exact.isfinite() & (exact.abs() > 1e-37)
        error = (got.double() - exact).abs() / exact.abs() / torch.finfo(dtype).eps
        assert error[known].max() < units, name
    assert_ran_as_planned(compiled, "O2")


STEPS: tuple[Any, ...] = (0.1, -0.1, 6.283185307179586, 3, -7.5, 0, INF, "many")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_remainders_and_whole_steps_are_eagers(dtype: torch.dtype) -> None:
    """Of all steps, each in a loop of its own."""

    def stepped(x: Tensor, step: Any) -> list[Tensor]:
        return [torch.remainder(x, step), x // step, torch.div(x, step, rounding_mode="floor")]

    def function(given: dict[str, tuple[Tensor, Any]]) -> dict[str, list[Tensor]]:
        return {name: stepped(x, step) for name, (x, step) in given.items()}

    whole, odd = torch.arange(5000.0), torch.tensor([0.0, -0.0, INF, -INF, NAN])
    x = torch.cat([torch.randn(5000) * 10, whole, torch.rand(2000) * 1e9 - 5e8, odd]).to(dtype)
    many = torch.randn_like(x) * 5
    given = {f"{step}": (x.clone(), many if step == "many" else step) for step in STEPS}
    compiled = compile_at("O2", function, dynamic=False)
    torch.testing.assert_close(compiled(given), function(given), rtol=0, atol=0, equal_nan=True)
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_whole_steps_in_half_precision(dtype: torch.dtype) -> None:
    odd = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 5.0, -5.0])
    x = torch.cat([odd, torch.randn(2000) * 50]).to(dtype)
    compiled = compile_at("O2", lambda x: [(x // 1.5) * 1, (x // -0.3) + 0])
    for got, own in zip(compiled(x), [(x // 1.5) * 1, (x // -0.3) + 0], strict=True):
        torch.testing.assert_close(got, own, rtol=0, atol=0, equal_nan=True)
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.skipif("avx2" not in machine.cpu().isa, reason="measured on x86 only")
@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_float32_is_replaced(dtype: torch.dtype) -> None:
    x = torch.randn(30, 40, dtype=dtype)
    graph = make_fx(lambda x: torch.tanh(x) * 2, tracing_mode="fake")(x)
    elementary.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    left = graph.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert len(left) == (dtype is not torch.float32)
    torch.testing.assert_close(graph(x), torch.tanh(x) * 2)


def test_gelu_in_training() -> None:
    def function(x: Tensor) -> Tensor:
        return functional.gelu(x * 2, approximate="tanh")

    compiled = compile_at("O2", function)
    found = []
    for run, dtype in (
        (compiled, torch.float32),
        (function, torch.float32),
        (function, torch.float64),
    ):
        x = torch.linspace(-6, 6, 9001, dtype=dtype).requires_grad_()
        out = run(x)
        out.sum().backward()
        found.append([out.detach(), x.grad])
    assert_contract(*found, "gelu")
    assert_ran_as_planned(compiled, "O2")
