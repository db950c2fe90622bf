"""Attention that is written otherwise than Inductor's patterns have it: what is written counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lowering import attention_patterns
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def over(dim: int) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / 4.0, dim=dim) @ v

    return attend


def times(dim: int) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.transpose(-2, -1)).mul(0.3).softmax(dim=dim).matmul(v)

    return attend


def added(dim: int) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.linspace(-1, 1, k.shape[2]).expand(1, 1, q.shape[2], k.shape[2])
        return torch.softmax(q @ k.transpose(-2, -1) / 4.0 + mask, dim=dim) @ v

    return attend


def filled(value: float) -> Any:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        hidden = torch.arange(k.shape[2]).view(1, 1, 1, -1) % 3 == 0
        scores = (q @ k.transpose(-2, -1)).div(4.0)
        return torch.softmax(scores.masked_fill(hidden, value), dim=-1) @ v

    return attend


WRITTEN = {
    "over keys": over(-1),
    "over queries": over(-2),
    "over heads": over(1),
    "over batches": over(0),
    "a factor, over queries": times(-2),
    "a factor, over heads": times(1),
    "a mask, over queries": added(-2),
    "filled with -1": filled(-1.0),
    "filled with 3": filled(3.0),
    "hidden": filled(float("-inf")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_inference(name: str) -> None:
    torch.manual_seed(0)
    model = Of(WRITTEN[name])
    compiled = compile_at("O2", model)
    hold(compiled, model, *(torch.randn(2, 4, 24, 16) for _ in range(3)))
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRITTEN)
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 24, 16) for _ in range(3)]
    model = Of(WRITTEN[name])

    def grads(function: Any, dtype: torch.dtype) -> list[Tensor]:
        own = [one.clone().to(dtype).requires_grad_() for one in given]
        function(*own).sin().sum().backward()
        return [one.grad for one in own if one.grad is not None]

    compiled = compile_at("O2", model)
    got, eager = grads(compiled, torch.float32), grads(model, torch.float32)
    assert_contract(got, eager, grads(model, torch.float64), name)
    assert_ran_as_planned(compiled, "O2")


def test_what_is_attention_is_still_found_in_training() -> None:
    q, k, v = (torch.randn(2, 4, 24, 16, requires_grad=True) for _ in range(3))
    before = counters["inductor"]["fuse_attention"]
    compile_at("O2", Of(over(-1)))(q, k, v).sum().backward()
    assert counters["inductor"]["fuse_attention"] > before


def test_torchs_patterns_are_as_they_were() -> None:
    """Also when one compilation ends within another."""
    from torch._inductor.fx_passes import joint_graph

    prepare = joint_graph.lazy_init
    compile_at("O2", Of(over(-1)))(*(torch.randn(2, 4, 24, 16) for _ in range(3)))
    found = attention_patterns._ready_made(joint_graph.patterns)
    ready_made = [cell for cell in found if cell.cell_contents is not None]
    assert ready_made
    with attention_patterns.compared_whole():
        with attention_patterns.compared_whole():
            attention_patterns._empty(joint_graph.patterns)
        assert all(cell.cell_contents is None for cell in ready_made)
    assert all(cell.cell_contents is not None for cell in ready_made)
    assert joint_graph.lazy_init is prepare
