"""Rows that are looked up by number and reduced are read in vectors along the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Tables = dict[str, Tensor]


def masked_mean(table: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    known = (places != 0).unsqueeze(-1)
    return (functional.embedding(places, table) * known).sum(1) / known.sum(1).clamp(min=1)


def weighted(table: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (table[places] * weights.to(table.dtype).softmax(-1)[..., None]).sum(1)


FUNCTIONS: dict[str, Function] = {
    "sum of embeddings": lambda table, places, _: functional.embedding(places, table).sum(1),
    "mean of rows": lambda table, places, _: table[places].mean(1),
    "masked mean": masked_mean,
    "weighted sum": weighted,
    "greatest difference": lambda table, places, _: (
        (table[places] - table[: len(places), None]).relu().amax(1)
    ),
    "variance": lambda table, places, _: table[places].var(1),
    "sum of sums": lambda table, places, _: table[places.view(4, -1, 5)].sum((1, 2)),
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def given(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Places of which some are the same."""
    return torch.randn(50, width, dtype=dtype), torch.randint(0, 50, (40, 15)), torch.rand(40, 15)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_row_is_read_along(name: str) -> None:
    """Tables of every dtype, side by side in one graph."""

    def of_each(tables: Tables, places: Tensor, weights: Tensor) -> Tables:
        return {kind: FUNCTIONS[name](one, places, weights) for kind, one in tables.items()}

    tables = {f"{dtype}": torch.randn(50, 72, dtype=dtype) for dtype in DTYPES}
    (_, *rest), compiled = given(72), compile_at("O2", of_each)
    wide = {kind: table.double() for kind, table in tables.items()}
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, tables, *rest)
        assert_contract(got, of_each(tables, *rest), of_each(wide, *rest), name)
    assert "_inner" not in code, "numbers of a vector, one by one"
    assert_ran_as_planned(compiled, "O2")


def each(tables: Tables, places: Tensor, weights: Tensor) -> Tables:
    """All functions in one graph, each of a table of its own."""
    return {name: FUNCTIONS[name](table, places, weights) for name, table in tables.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [1, 3, 8, 16, 17, 33])
def test_rows_of_any_width(width: int) -> None:
    tables = {name: torch.randn(50, width) for name in FUNCTIONS}
    (_, *rest), compiled = given(width), compile_at("O2", each)
    wide = {name: table.double() for name, table in tables.items()}
    with torch.no_grad():
        got, own = compiled(tables, *rest), each(tables, *rest)
        assert_contract(got, own, each(wide, *rest), f"{width}")
    assert_ran_as_planned(compiled, "O2")


def test_the_greatest_of_rows_and_its_place() -> None:
    table, places, _ = given(40)

    def function(table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return table[places].max(1)

    compiled = compile_at("O2", function)
    for got, own in zip(compiled(table, places), function(table, places), strict=True):
        torch.testing.assert_close(got, own, rtol=0, atol=0)
    assert_ran_as_planned(compiled, "O2")


def test_places_beyond_the_table_are_an_error() -> None:
    table, places, weights = given(40)
    compiled = compile_at("O2", FUNCTIONS["mean of rows"])
    compiled(table, places, weights)
    places[3, 4] = 50
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(table, places, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_result_that_is_stored_twice(dtype: torch.dtype) -> None:
    table, places, _ = given(40, dtype)

    def function(table: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        rows = table[places]
        return rows.amax(1), *rows.max(1), rows.sum(1), rows.sum(1, keepdim=True)

    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, own = compiled(table, places), function(table, places)
        assert_contract(got, own, function(table.double(), places), str(dtype))
    assert_ran_as_planned(compiled, "O2")


def test_gradients_of_rows_that_are_looked_up() -> None:
    (_, *rest), tables = given(40), {name: torch.randn(50, 40) for name in FUNCTIONS}

    def gradients(call: Callable[..., Tables], dtype: torch.dtype) -> Tables:
        leaves = {name: one.to(dtype, copy=True).requires_grad_() for name, one in tables.items()}
        found = call(leaves, *rest)
        torch.autograd.backward([one.square().sum() for one in found.values()])
        return {name: leaf.grad for name, leaf in leaves.items()}

    got = gradients(compile_at("O2", each), torch.float32)
    own, exact = gradients(each, torch.float32), gradients(each, torch.float64)
    assert_contract(got, own, exact, "gradients")
