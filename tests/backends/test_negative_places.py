"""Places that eager does not count from the end are refused in compiled graphs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_dispatch
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

Function = Callable[[Tensor, Tensor], Tensor]


def added_in_place(table: Tensor, places: Tensor) -> Tensor:
    total = table * 0
    total.index_add_(0, places, table[: len(places)], alpha=2)
    return total


def checkpointed(table: Tensor, places: Tensor) -> Tensor:
    def selected(table: Tensor, places: Tensor) -> Tensor:
        return table.index_select(0, places) * 2

    got = checkpoint(selected, table, places, use_reentrant=False)
    assert isinstance(got, Tensor)
    return got


FUNCTIONS: dict[str, Function] = {
    "index_select": lambda table, places: table.index_select(0, places) * 2,
    "of the last dimension": lambda table, places: table.index_select(-1, places) * 2,
    "by name": lambda table, places: torch.index_select(input=table, dim=1, index=places) * 2,
    "index_add": lambda table, places: table.index_add(0, places, table[: len(places)]) * 2,
    "index_add_": added_in_place,
    "index_copy": lambda table, places: (
        table.index_copy(0, places.long(), table[: len(places)]) * 2
    ),
    "in a graph within": checkpointed,
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_negative_place_is_eagers_error(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    function, table = FUNCTIONS[name], torch.randn(20, 30)
    places = torch.tensor([3, 0, 19, 3], dtype=dtype)
    wrong = torch.tensor([3, 0, -1, 3], dtype=dtype)
    compiled = compile_at("O2", function, dynamic=dynamic)
    with torch.no_grad():
        exact = function(table.double(), places)
        assert_contract(compiled(table, places), function(table, places), exact, name)
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(table, wrong)
        with pytest.raises(type(eager.value)) as got:
            compiled(table, wrong)
        assert str(got.value).split("\n")[0] == str(eager.value).split("\n")[0]
    assert_ran_as_planned(compiled, "O2")
    assert kernel_dispatch.report(compiled)[0].runs_by_provider == {"inductor": 1}


def test_gradients_of_what_is_selected() -> None:
    table, places = torch.randn(20, 30, requires_grad=True), torch.tensor([3, 0, 19, 3])
    function = FUNCTIONS["index_select"]
    compiled = compile_at("O2", function)
    double = table.detach().double().requires_grad_()
    got, own, exact = (
        torch.autograd.grad(one(where, places).square().sum(), where)
        for one, where in ((compiled, table), (function, table), (function, double))
    )
    assert_contract(got, own, exact, "torch.float32")
    assert_ran_as_planned(compiled, "O2")


def test_other_places_are_counted_from_the_end_as_in_eager() -> None:
    table, places = torch.randn(20, 30), torch.tensor([3, -1, -20])
    compiled = compile_at("O2", lambda table, places: table[places] * 2)
    assert torch.equal(compiled(table, places), table[places] * 2)
    assert_ran_as_planned(compiled, "O2")
