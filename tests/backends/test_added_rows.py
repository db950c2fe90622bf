"""Rows that are added at places of a tensor: torch's kernel takes them, and the numbers hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.support.compiling import compile_at, threads
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor
PLACES, ROWS, SIZE = 40, 3000, 64


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def places(count: int = ROWS) -> Tensor:
    return torch.randint(0, PLACES, (count,))


def messages(model: Any, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
    sent = torch.nn.functional.linear(x, model.weight)[start]
    return torch.zeros_like(x).index_add(0, end, sent) / 3 + x


def graph_network() -> Any:
    return Of(messages, weight=torch.nn.Parameter(torch.randn(SIZE, SIZE) / 6))


def code_of(function: Any, *inputs: Tensor) -> str:
    torch._dynamo.reset()
    with torch.no_grad(), no_cached_graphs():
        _, codes = run_and_get_code(compile_at("O2", function), *inputs)
    return "\n".join(codes)


ADDED: dict[str, Any] = {
    "index_add": lambda x, at, rows: x.index_add(0, at, rows),
    "with a factor": lambda x, at, rows: x.index_add(0, at, rows, alpha=0.3),
    "index_put": lambda x, at, rows: x.index_put((at,), rows, accumulate=True),
    "places from the end": lambda x, at, rows: x.index_put((at - PLACES,), rows, accumulate=True),
    "places of 32 bits": lambda x, at, rows: x.index_add(0, at.int(), rows),
    "three dimensions": lambda x, at, rows: (
        x.view(PLACES, 4, -1).index_add(0, at, rows.view(ROWS, 4, -1)).flatten(1)
    ),
    "numbers": lambda x, at, rows: (
        x.flatten().index_add(0, at.repeat(SIZE), rows.flatten()).view(x.shape)
    ),
}
LEFT: dict[str, Any] = {
    "few": lambda x, at, rows: x.index_add(0, at[:9], rows[:9]),
    "not added": lambda x, at, rows: x.index_put((torch.arange(PLACES),), rows[:PLACES]),
    "two places": lambda x, at, rows: x.index_put((at, at % SIZE), rows[:, 0], accumulate=True),
    "in bfloat16": lambda x, at, rows: x.bfloat16().index_add(0, at, rows.bfloat16()).float(),
}


def model_of(function: Any) -> Any:
    """With something before and behind it: one operation alone is left to eager."""
    return Of(lambda m, x, at, rows: function(x.sin(), at, rows.cos()).tanh() * x.exp())


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(PLACES, SIZE), places(), torch.randn(ROWS, SIZE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ADDED)
def test_torchs_kernel_adds(name: str, team: int) -> None:
    """One thread adds in a loop of Inductor's, without atomic additions."""
    model, given = model_of(ADDED[name]), inputs()
    code = code_of(model, *given)
    assert "atomic_add" not in code
    assert ("scatter" in code) == (team > 1)
    compiled = compile_at("O2", model)
    hold(compiled, model, *given)
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    model, given = model_of(LEFT[name]), inputs()
    assert "scatter" not in code_of(model, *given)
    compiled = compile_at("O2", model)
    hold(compiled, model, *given)
    assert_ran_as_planned(compiled, "O2")


def test_a_graph_network_is_trained() -> None:
    """The gradient of what was gathered is added so, too."""
    model = graph_network()
    given = (torch.randn(PLACES, SIZE), places(), places())

    def gradients(call: Any, owner: Any, *inputs: Any) -> list[Tensor]:
        x = inputs[0].detach().requires_grad_()
        owner.zero_grad()
        call(x, *inputs[1:]).square().mean().backward()
        return [x.grad, owner.weight.grad.clone()]

    compiled = compile_at("O2", model)
    got = gradients(compiled, model, *given)
    eager = gradients(model, model, *given)
    wide = copy.deepcopy(model).double()
    assert_contract(got, eager, gradients(wide, wide, given[0].double(), *given[1:]), "gradients")
    assert_ran_as_planned(compiled, "O2")


def test_numbers_of_rows_that_change() -> None:
    model = graph_network()
    compiled = compile_at("O2", model)
    for count in (3000, 4110, 1000):
        start, end = places(count), places(count)
        for tensor in (start, end):
            torch._dynamo.mark_dynamic(tensor, 0)
        hold(compiled, model, torch.randn(PLACES, SIZE), start, end, where=str(count))


def test_the_same_numbers_in_every_call() -> None:
    model = model_of(ADDED["index_add"])
    compiled = compile_at("O2", model)
    given = (torch.zeros(3, 64), torch.randint(0, 3, (5000,)), torch.randn(5000, 64))
    with torch.no_grad():
        first = compiled(*given)
        assert all(torch.equal(first, compiled(*given)) for _ in range(10))


def test_a_place_that_is_not_there_is_refused() -> None:
    model, given = model_of(ADDED["index_add"]), inputs()
    given[1][7] = PLACES
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of"):
        compile_at("O2", model)(*given)
