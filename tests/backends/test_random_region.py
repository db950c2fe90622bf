"""Random numbers of compiled graphs: who draws them, and what a seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import assert_regions, kernels, no_cached_graphs
from tests.support.reports import graph_reports


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def drop(x: Tensor) -> Tensor:
    return functional.dropout(x * 2, 0.25)


def test_dropout() -> None:
    """A quarter is dropped, and the gradient of what is left is what it was scaled by."""
    compiled, x = compile_at("O2", drop), torch.rand(200, 300).add(1).requires_grad_()
    out = compiled(x)
    out.sum().backward()
    kept = out != 0
    assert abs(kept.double().mean() - 0.75) < 0.01
    torch.testing.assert_close(out[kept], (x * 2 / 0.75)[kept])
    torch.testing.assert_close(x.grad, kept / 0.75 * 2)
    assert_regions(compiled, ("random", "openmp", 1, 1))


def test_a_seed_gives_the_same_numbers_again() -> None:
    compiled, x = compile_at("O2", drop), torch.ones(64, 64)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append([compiled(x), compiled(x)])
    (first, second), again, others = found
    assert first.equal(again[0])
    assert second.equal(again[1])
    assert not first.equal(second)
    assert not first.equal(others[0])


FUNCTIONS: dict[str, Any] = {
    "rand": (lambda x: torch.rand_like(x) + x * 0, 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(x.shape) + x * 0, 0.0, 1.0),
    "bernoulli": (lambda x: torch.bernoulli(x * 0 + 0.3), 0.3, 0.21),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_draws(name: str) -> None:
    function, mean, variance = FUNCTIONS[name]
    compiled = compile_at("O2", function)
    found = compiled(torch.ones(300, 400)).double()
    assert abs(found.mean() - mean) < 0.02
    assert abs(found.var() - variance) < 0.02
    assert_regions(compiled, ("random", "openmp", 1, 1))


def test_two_layers_draw_apart() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    model[1].weight.data.copy_(torch.eye(8))
    model[1].bias.data.zero_()
    compiled = compile_at("O2", model)
    out = compiled(torch.ones(4000, 8))
    assert abs((out != 0).double().mean() - 0.25) < 0.02
    assert_regions(compiled, ("random", "openmp", 2, 2))


def test_sizes_that_change() -> None:
    compiled = compile_at("O2", drop, dynamic=True)
    for rows in (30, 50):
        out = compiled(torch.ones(rows, 100))
        assert out.shape == (rows, 100)
        assert abs((out != 0).double().mean() - 0.75) < 0.05
    assert_regions(compiled, ("random", "openmp", 1, 2))


def test_eagers_own_numbers_where_they_are_asked_for() -> None:
    options = {"inductor": {"fallback_random": True}}
    compiled, x = compile_at("O2", drop, options=options), torch.ones(64, 64)
    torch.manual_seed(0)
    got = compiled(x)
    torch.manual_seed(0)
    assert got.equal(drop(x))
    assert_regions(compiled)


def test_it_can_be_switched_off() -> None:
    compiled = compile_at("O2", drop, options={"disable": "openmp"})
    compiled(torch.ones(5, 5))
    (graph,) = graph_reports(compiled)
    assert "random" not in {one["region"] for one in graph.as_dict()["regions"]}
