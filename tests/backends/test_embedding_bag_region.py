"""Bags of several tables are read at once, in each spelling; what cannot be read so stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.compiling import compile_at
from tests.support.modules import in_double
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    details,
    hold,
    kernels,
    no_cached_graphs,
    region_rows,
)
from tests.support.reports import fallbacks_of

Tensor = torch.Tensor
ROWS, WIDTHS = 40, (16, 24, 5)


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    kernels()


class Tables(nn.Module):
    """Tables of several widths beside each other, as recommendation models have them."""

    def __init__(self, spelling: Callable[..., Tensor], mode: str = "sum") -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, width, mode=mode) for width in WIDTHS)
        self.spelling = spelling

    def forward(self, *given: Tensor) -> Tensor:
        bags = [self.spelling(table, *given) for table in self.tables]
        return torch.cat([torch.relu(bags[0]), *bags[1:]], dim=1)


def _numbers(count: int = 23, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """With an empty bag, at the end as well."""
    begins = torch.tensor([0, 3, 3, 10, count], dtype=dtype)
    return torch.randint(0, ROWS, (count,), dtype=dtype), begins


def _of_equal_length(table: Any, numbers: Tensor, begins: Tensor) -> Tensor:
    return table(numbers[:20].reshape(4, 5))


def _with_end(table: Any, numbers: Tensor, begins: Tensor) -> Tensor:
    return functional.embedding_bag(
        numbers, table.weight, begins, mode=table.mode, include_last_offset=True
    )


def _without_a_row(table: Any, numbers: Tensor, begins: Tensor) -> Tensor:
    left_out = functional.embedding_bag
    return left_out(numbers, table.weight, begins, mode=table.mode, padding_idx=-2)


def _weighted(table: Any, numbers: Tensor, begins: Tensor) -> Tensor:
    return table(numbers, begins, per_sample_weights=numbers.to(table.weight.dtype) / ROWS)


SPELLINGS = {
    "bags": (lambda table, *given: table(*given), ("sum", "mean")),
    "equal length": (_of_equal_length, ("sum", "mean")),
    "with end": (_with_end, ("sum", "mean")),
    "without a row": (_without_a_row, ("sum", "mean")),
    "weighted": (_weighted, ("sum",)),
}
CASES = [(name, mode) for name, (_, modes) in SPELLINGS.items() for mode in modes]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_spellings(name: str, mode: str, dtype: torch.dtype) -> None:
    model = Tables(SPELLINGS[name][0], mode).eval().to(dtype)
    with no_cached_graphs():
        compiled = compile_at("O2", model, dynamic=False)
        hold(compiled, model, *_numbers(), where=name)
    assert_regions(compiled, ("embedding_bag", "openmp", 1, 1))
    assert details(compiled, "embedding_bag") == [f"with {len(WIDTHS)} tables"]


def test_integers_of_32_bits() -> None:
    model = Tables(SPELLINGS["bags"][0]).eval()
    compiled = compile_at("O2", model, dynamic=False)
    hold(compiled, model, *_numbers(dtype=torch.int32))
    assert_regions(compiled, ("embedding_bag", "openmp", 1, 1))


def test_any_number_of_bags() -> None:
    model = Tables(SPELLINGS["bags"][0], "mean").eval()
    compiled = compile_at("O2", model, dynamic=True)
    for count in (23, 11, 40):
        hold(compiled, model, *_numbers(count), where=str(count))
    assert not fallbacks_of(compiled)
    assert sum(runs for *_, runs in region_rows(compiled)) == 3


def test_a_table_that_needs_another_ones_result() -> None:
    """Two regions: what the first gives decides what the second reads."""

    class InTurn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.EmbeddingBag(ROWS, 8, mode="sum") for _ in range(2))

        def forward(self, numbers: Tensor, begins: Tensor) -> Tensor:
            one = self.first(numbers, begins)
            chosen = (one.sum(1) > 0).to(torch.int64)
            return torch.cat([one, self.second(chosen, torch.arange(5))], 1)

    model = InTurn().eval()
    with no_cached_graphs():
        compiled = compile_at("O2", model, dynamic=False)
        hold(compiled, model, *_numbers())
    assert_regions(compiled, ("embedding_bag", "openmp", 2, 2))


def test_results_that_are_outputs_lie_as_eagers() -> None:
    class Outputs(Tables):
        def forward(self, *given: Tensor) -> Any:
            return [table(*given) for table in self.tables]

    model = Outputs(SPELLINGS["bags"][0]).eval()
    compiled = compile_at("O2", model, dynamic=False)
    got = hold(compiled, model, *_numbers())
    assert len({one.untyped_storage().data_ptr() for one in got}) == len(WIDTHS)


@pytest.mark.parametrize("reason", ["maxima", "float64", "training"])
def test_what_is_left_to_torch(reason: str) -> None:
    model = Tables(SPELLINGS["bags"][0], "max" if reason == "maxima" else "sum").eval()
    if reason == "float64":
        model.double()
    compiled = compile_at("O2", model, dynamic=False)
    numbers = _numbers()
    if reason == "training":
        got, own = compiled(*numbers), model(*numbers)
        assert_contract(got.detach(), own.detach(), in_double(model, *numbers), reason)
    else:
        hold(compiled, model, *numbers, where=reason)
    assert "embedding_bag" not in {region for region, *_ in region_rows(compiled)}


def test_a_table_that_is_computed_lies_as_its_maker_likes() -> None:
    def read(turned: Tensor, numbers: Tensor, begins: Tensor) -> Tensor:
        table = (turned.t() * 2).contiguous()
        return functional.embedding_bag(numbers, table, begins, mode="sum") * 3

    given = (torch.randn(16, ROWS), *_numbers())
    compiled = compile_at("O2", read, dynamic=False)
    exact = read(given[0].double(), *given[1:])
    assert_contract(compiled(*given), read(*given), exact, "turned")
    assert_regions(compiled, ("embedding_bag", "openmp", 1, 1))


@pytest.mark.parametrize("beside", [0, 2])
def test_bags_that_are_a_table(beside: int) -> None:
    """They are columns of one tensor by then, or a tensor of their own."""

    def read(table: Tensor, others: list[Tensor], numbers: Tensor, begins: Tensor) -> Tensor:
        first, *more = (
            functional.embedding_bag(numbers, one, begins, mode="sum") for one in (table, *others)
        )
        again = functional.embedding_bag(begins % 5, first, torch.arange(2), mode="sum")
        return torch.cat([again.flatten() * 2, *(one.flatten() for one in more)])

    tables = [torch.randn(ROWS, 8) for _ in range(1 + beside)]
    numbers = _numbers()
    compiled = compile_at("O2", read, dynamic=False)
    exact = read(tables[0].double(), [one.double() for one in tables[1:]], *numbers)
    got, own = compiled(tables[0], tables[1:], *numbers), read(tables[0], tables[1:], *numbers)
    assert_contract(got, own, exact, "a table of bags")
    assert_regions(compiled, ("embedding_bag", "openmp", 2, 2))


def test_factors_of_another_dtype_are_an_error_as_in_eager() -> None:
    def weighed(table: Tensor, numbers: Tensor, begins: Tensor, factors: Tensor) -> Tensor:
        return functional.embedding_bag(
            numbers, table, begins, mode="sum", per_sample_weights=factors
        )

    given = (torch.randn(ROWS, 8), *_numbers(), torch.ones(23, dtype=torch.float64))
    for function in (weighed, compile_at("O2", weighed, dynamic=False)):
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError), match="same type"):
            function(*given)


@pytest.mark.parametrize("wrong", ["too large", "negative", "order"])
def test_wrong_numbers_are_an_error_as_in_eager(wrong: str) -> None:
    model = Tables(SPELLINGS["bags"][0]).eval()
    numbers, begins = _numbers()
    compiled = compile_at("O2", model, dynamic=False)
    with torch.no_grad():
        compiled(numbers, begins)
        if wrong == "order":
            begins = begins.flip(0)
        else:
            numbers[4] = ROWS if wrong == "too large" else -1
        for function in (model, compiled):
            with pytest.raises(RuntimeError):
                function(numbers, begins)
