"""A sum of equal numbers is a product; that they are equal is seen through views and functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import equal_numbers, reductions
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import assert_ran_as_planned

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


EQUAL: dict[str, Any] = {
    "times ones": lambda x, y: (x[:, None] * torch.full((1, 300, 1), 2.0)).sum(1),
    "spread": lambda x, y: x[:, None].expand(6, 300, 5).sum(1),
    "kept": lambda x, y: (x.view(6, 1, 5).expand(6, 300, 5) / 7).sum(1, keepdim=True),
    "a mean": lambda x, y: torch.sigmoid(x.view(6, 1, 5).expand(6, 300, 5)).mean(1),
    "new dimensions": lambda x, y: (x.expand(4, 70, 6, 5) * 3).sum((0, 1)),
    "all of them": lambda x, y: x[:1, :1].expand(20, 30).exp().sum(),
    "turned and joined": lambda x, y: (
        (x.view(6, 5, 1, 1).expand(6, 5, 16, 20) / 9).permute(0, 2, 3, 1).reshape(6, 320, 5).sum(1)
    ),
    "joined with batches": lambda x, y: (
        x[:1].view(5, 1, 1).expand(5, 16, 20).permute(1, 2, 0).reshape(320, 5).sum(0)
    ),
    "with others that are": lambda x, y: (
        x.view(6, 1, 5).expand(6, 300, 5) * x[:, None].tanh() + 1
    ).sum(1),
}
OTHERS: dict[str, Any] = {
    "one that is not": lambda x, y: (x.view(6, 1, 5).expand(6, 300, 5) * y).sum(1),
    "another dimension": lambda x, y: x.view(6, 1, 5).expand(6, 300, 5).sum((1, 2)),
    "cut across": lambda x, y: x.view(6, 1, 5).expand(6, 300, 5).reshape(6, 500, 3).sum(1),
    "counted": lambda x, y: torch.arange(300.0)[None, :, None].expand(6, 300, 5).sum(1),
    "far away": lambda x, y: sixty_functions(x.view(6, 1, 5).expand(6, 300, 5)).sum(1),
}


def sixty_functions(x: Tensor) -> Tensor:
    for _ in range(60):
        x = x * 0.5 + 1
    return x


def multiplied(function: Any) -> bool:
    """Does no sum of the traced graph remain?"""
    x, y = torch.randn(6, 5), torch.randn(6, 300, 5)
    module = make_fx(function, tracing_mode="fake")(x, y)
    reductions.put_right(module.graph)
    module.graph.eliminate_dead_code()
    sums = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}
    return not any(node.target in sums for node in module.graph.nodes)


@pytest.mark.quick
@pytest.mark.parametrize("name", [*EQUAL, *OTHERS])
def test_in_the_graph(name: str) -> None:
    assert multiplied({**EQUAL, **OTHERS}[name]) is (name in EQUAL)


def test_the_numbers() -> None:
    """All in one graph, each of numbers of its own."""
    functions = {**EQUAL, **OTHERS}

    def each(self: Any, *given: Tensor) -> dict[str, Tensor]:
        pairs = zip(functions.values(), given[::2], given[1::2], strict=True)
        return {name: one(x, y) for name, (one, x, y) in zip(functions, pairs, strict=True)}

    model = Of(each)
    compiled = compile_at("O2", model)
    given = [torch.randn(size) for _ in functions for size in ((6, 5), (6, 300, 5))]
    hold(compiled, model, *given)
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.quick
def test_many_ways_lead_to_one_node() -> None:
    def function(x: Tensor) -> Tensor:
        x = x.view(6, 1, 5).expand(6, 300, 5)
        for _ in range(20):
            x = x * x.sigmoid()
        return x.sum(1)

    module = make_fx(function, tracing_mode="fake")(torch.randn(6, 5))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert equal_numbers.are_equal(node.args[0], {1})


def test_the_gradient_of_a_bias_behind_a_mean() -> None:
    """256 equal numbers were added one by one: 3 to 5 times what the contract allows."""
    model: Any = Of(
        lambda m, x: (m.scale * m.linear(x)).view(2, 16, 16, 32).permute(0, 3, 1, 2).mean((2, 3)),
        linear=nn.Linear(24, 32),
        scale=nn.Parameter(torch.rand(32)),
    )

    def grads(function: Any, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        function(x).pow(2).sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(512, 24)
        compiled = compile_at("O2", model.float())
        got, own = grads(compiled, x), grads(model, x)
        assert_contract(got, own, grads(model.double(), x.double()), f"seed {seed}")
        assert_ran_as_planned(compiled, "O2")
