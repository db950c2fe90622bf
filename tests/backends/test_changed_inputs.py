"""Inputs and buffers that a graph changes: what it read before counts, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowering import overwritten
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned

COPIED = torch.ops.kernel_dispatch.copied.default


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


# --- the backward of what was read ----------------------------------------------------------------


def by_a_running_square(m: Any, x: Tensor) -> Tensor:
    y = x * torch.rsqrt(m.buffer + 1e-5) * m.weight
    m.buffer.mul_(0.5).add_(x.detach().pow(2).mean(0), alpha=0.5)
    return y


def by_a_sine(m: Any, x: Tensor) -> Tensor:
    y = (x * m.weight * m.buffer.sin()).tanh()
    m.buffer.mul_(0.5).add_(y.detach().mean(0) * 0.1)
    return y


def by_a_view(m: Any, x: Tensor) -> Tensor:
    turned = m.buffer.view(8, 8).mT.reshape(64)
    y = x * m.weight * turned.cos()
    m.buffer.copy_(m.buffer.roll(1, 0))
    return y * turned.sin()


def in_part(m: Any, x: Tensor) -> Tensor:
    y = x * m.weight * m.buffer[:32].exp().repeat(2)
    m.buffer[:32] = m.buffer[32:] * 0.5
    return y.sin()


def by_index(m: Any, x: Tensor) -> Tensor:
    m.buffer[torch.arange(64)] = m.buffer * 0.7
    m.buffer.add_(m.buffer.flip(0))
    return (x * m.weight * m.buffer).sin()


@pytest.mark.parametrize("function", [by_a_running_square, by_a_sine, by_a_view, in_part, by_index])
def test_gradients(function: Any) -> None:
    torch.manual_seed(0)
    model: Any = Of(function, weight=nn.Parameter(torch.randn(64)))
    model.register_buffer("buffer", torch.rand(64) + 3)
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    steps = [torch.randn(32, 64) for _ in range(2)]

    def trained(call: Any, of: Any) -> list[Tensor]:
        found = []
        for x in steps:
            mine = x.to(of.weight.dtype, copy=True).requires_grad_()
            of.zero_grad()
            call(mine).pow(2).sum().backward()
            assert mine.grad is not None
            found += [mine.grad, of.weight.grad.clone(), of.buffer.clone()]
        return found

    compiled = compile_at("O2", model)
    got = trained(compiled, model)
    assert_contract(got, trained(own, own), trained(wide, wide), function.__name__)
    assert_ran_as_planned(compiled, "O2")


# --- what is written by index and read at other places --------------------------------------------


def then_added(x: Tensor) -> Tensor:
    x[torch.arange(x.size(0))] = x * 2.0
    x.add_(x.flip(0))
    return x


def then_moved(x: Tensor) -> Tensor:
    x[torch.arange(x.size(0))] = x * 2.0
    x[1:] = x[:-1].clone()
    return x


def added_by_index(x: Tensor) -> Tensor:
    x.index_add_(0, torch.arange(x.size(0)).flip(0), x * 0.5)
    x.sub_(x.roll(1, 0))
    return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [then_added, then_moved, added_by_index])
def test_read_at_other_places(function: Any, dynamic: bool) -> None:
    compiled = compile_at("O2", Of(lambda m, x: function(x)), dynamic=dynamic)
    for size in ((300, 70), (33, 50)) if dynamic else ((300, 70),):
        x = torch.rand(size)
        mine, own = x.clone(), x.clone()
        with torch.no_grad():
            got, expected = compiled(mine), function(own)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(mine, own)
    assert_ran_as_planned(compiled, "O2")


def into_a_cache(cache: Tensor, x: Tensor) -> Tensor:
    """As a step of decoding: it is read as a whole, and nothing of that is written back."""
    cache[:, 3:5] = x
    return (cache * 2).sum(1)


def into_a_cache_twice(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, 3:5] = x
    cache.index_copy_(1, torch.tensor([7, 8]), x * 2)
    return cache.mean(1)


@pytest.mark.parametrize("function", [into_a_cache, into_a_cache_twice])
def test_caches_are_written_where_they_lie(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    put_right = overwritten.put_right

    def watched(graph: Any) -> None:
        put_right(graph)
        graphs.append(graph)
        assert not graph.find_nodes(op="call_function", target=COPIED)

    monkeypatch.setattr(overwritten, "put_right", watched)
    compiled = compile_at("O2", Of(lambda m, cache, x: function(cache, x)))
    cache, x = torch.randn(2, 16, 40), torch.randn(2, 2, 40)
    mine, own = cache.clone(), cache.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(mine, x), function(own, x))
    torch.testing.assert_close(mine, own)
    assert graphs
