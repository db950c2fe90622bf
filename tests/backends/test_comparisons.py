"""Questions about numbers are asked as comparisons, and have the answers that eager has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import comparisons
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_bit_identical
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
ODD = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.5, -2.0)
ASKED = {
    aten.isnan.default,
    aten.isinf.default,
    aten.signbit.default,
    aten.logical_not.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def odd(dtype: torch.dtype, turned: int = 0) -> Tensor:
    """All odd numbers beside all others, in vectors and in what is left of them."""
    numbers = torch.tensor(ODD if dtype.is_floating_point else (0, 1, 2, 0, 127), dtype=dtype)
    return numbers.repeat(31).roll(turned)[:301].repeat(7, 1)


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "isnan": lambda x, y: x.isnan(),
    "isinf": lambda x, y: x.isinf(),
    "isfinite": lambda x, y: x.isfinite(),
    "signbit": lambda x, y: x.signbit(),
    "not": lambda x, y: x.logical_not(),
    "and": lambda x, y: x.logical_and(y),
    "or": lambda x, y: x.logical_or(y),
    "xor": lambda x, y: x.logical_xor(y),
    "and with truth": lambda x, y: x.logical_and(y > 0),
    "bool": lambda x, y: x.bool(),
    "any": lambda x, y: x.any(-1),
    "all": lambda x, y: x.all(-1),
    "of two dtypes": lambda x, y: x.logical_or(y.double()),
}
OF_FLOATS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nan_to_num": lambda x, y: x.nan_to_num(),
    "angle": lambda x, y: x.angle(),
    "nansum": lambda x, y: torch.where(x.isinf(), 1.0, x).double().nansum(-1),
    "safe": lambda x, y: torch.where(x.isnan() | y.isinf(), 0.0, x * 2),
}


def all_at_once(dtype: torch.dtype) -> Callable[[Tensor, Tensor], list[Any]]:
    cases = {**CASES, **(OF_FLOATS if dtype.is_floating_point else {})}
    return lambda x, y: [case(x, y) for case in cases.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    function = all_at_once(dtype)
    given = odd(dtype), odd(dtype, 3)
    compiled = compile_at("O2", function)
    with torch.no_grad():
        assert_bit_identical(compiled(*given), function(*given), str(dtype))
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_in_the_graph(name: str, dtype: torch.dtype) -> None:
    given = odd(dtype), odd(dtype, 3)
    graph = make_fx(CASES[name], select_decomp_table(), tracing_mode="fake")(*given)
    (x, *_) = graph.graph.nodes
    with x.meta["val"].fake_mode:  # as it is when a graph is compiled
        comparisons.put_right(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert_bit_identical(graph(*given), CASES[name](*given), name)
    left = set() if dtype.is_floating_point else {aten.isnan.default, aten.isinf.default}
    for node in graph.graph.nodes:
        if node.target in ASKED - left:
            assert all(one.meta["val"].dtype is torch.bool for one in node.all_input_nodes)


def compared(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x > y, x >= y, x < y, x <= y, x == y, x != y]


def asked_of_bytes(x: Tensor) -> list[Tensor]:
    found = [x.amax(-1), x.amin(), x.argmax(0), x.argmin(-1), x.flip(-1).argmax(-1), x.any(0)]
    return [*found, x > 100, x == 0, x <= 2.5, x != 127, x > -1, x == 200, x < 300, x.bool()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_bytes(dtype: torch.dtype) -> None:
    numbers = torch.arange(256).to(torch.uint8)
    x, turned = numbers.view(dtype).repeat(9, 1), numbers.flip(0)
    others = {
        f"{other}": turned.to(other).repeat(9, 1)
        for other in (torch.uint8, torch.int8, torch.int32)
    }

    def function(x: Tensor, others: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        beside = {f"with {other}": compared(x, y) for other, y in others.items()}
        return {**beside, "alone": asked_of_bytes(x)}

    compiled = compile_at("O2", function)
    assert_bit_identical(compiled(x, others), function(x, others), f"{dtype}")
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
def test_bytes_in_the_graph() -> None:
    """Inductor is asked nothing about bytes themselves."""

    def function(x: Tensor) -> list[Tensor]:
        return [x > x.flip(0), x == 7, x.amax(-1), x.argmin(0), x.any(), x.bool()]

    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(odd(torch.uint8))
    comparisons.put_right(graph.graph)
    asks = {aten.gt, aten.eq, aten.ne, aten.amax, aten.argmin, aten.any}
    found = [
        one for one in graph.graph.nodes if getattr(one.target, "overloadpacket", None) in asks
    ]
    assert len(found) == 7
    for node in found:
        assert all(one.meta["val"].dtype is not torch.uint8 for one in node.all_input_nodes)
    graph.recompile()
    x = odd(torch.uint8)
    assert_bit_identical(graph(x), function(x), "bytes")


def test_integers_of_few_operators() -> None:
    dtypes = (torch.uint16, torch.uint32, torch.uint64)
    given = {f"{one}": torch.randint(0, 5, (7, 301), dtype=torch.uint8).to(one) for one in dtypes}

    def function(given: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        return {dtype: (x.isinf(), x.isnan(), x.signbit()) for dtype, x in given.items()}

    compiled = compile_at("O2", function)
    assert_bit_identical(compiled(given), function(given), "integers")
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
def test_complex_numbers_stay() -> None:
    x = torch.complex(odd(torch.float32), odd(torch.float32, 3))
    graph = make_fx(lambda x: x.logical_not(), tracing_mode="fake")(x)
    comparisons.put_right(graph.graph)
    assert graph.graph.find_nodes(op="call_function", target=aten.logical_not.default)
