"""Softmax of rows: in which spellings ours computes it, and what is left to Inductor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import assert_regions, hold, kernels, no_cached_graphs


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def spelled(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


TAKEN: dict[str, Any] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "of the last by number": lambda x: functional.softmax(x, dim=2),
    "logarithm": lambda x: functional.log_softmax(x, -1),
    "spelled": spelled,
    "behind a product": lambda x: torch.softmax((x @ x).view(-1, 2, 5, x.shape[-1]), -1),
    "before one": lambda x: torch.softmax(x, -1) @ x,
    "the largest": lambda x: torch.softmax(x, -1).topk(3),
    "between products": lambda x: torch.softmax(x @ x.mT, -1) @ x,
}
LEFT: dict[str, Any] = {
    "another dimension": lambda x: torch.softmax(x, 1),
    "double": lambda x: torch.softmax(x.double(), -1),
    "rows that lie side by side": lambda x: torch.softmax(x.transpose(1, 2), -1),
    "a mask before it": lambda x: torch.softmax(
        x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -math.inf), -1
    ),
    "a function before it": lambda x: torch.softmax(x.relu().view(-1, x.shape[-1]), -1),
    "a function behind it": lambda x: (torch.softmax(x, -1).view(-1) * 3).relu(),
    "a sum behind it": lambda x: torch.softmax(x, -1).sum(0),
    "one number of each row": lambda x: functional.log_softmax(x, -1)[..., 2] + 1,
    "exponentials that are used": lambda x: (
        (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True) + e
    ),
    "not the maximum": lambda x: (
        (e := torch.exp(x - x.amin(-1, keepdim=True))) / e.sum(-1, keepdim=True)
    ),
    "another row's sum": lambda x: (
        (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.flip(0).sum(-1, keepdim=True)
    ),
}


def of_each(functions: dict[str, Any]) -> Of:
    """All in one graph, each of numbers of its own."""

    def each(self: Any, *given: Tensor) -> dict[str, Any]:
        return {name: functions[name](x) for name, x in zip(functions, given, strict=True)}

    return Of(each)


@pytest.mark.parametrize("dynamic", [False, True])
def test_taken(dynamic: bool) -> None:
    model = of_each(TAKEN)
    compiled = compile_at("O2", model, dynamic=dynamic)
    sizes = [(3, 40, 40), (2, 50, 50)] if dynamic else [(3, 40, 40)]
    for size in sizes:
        hold(compiled, model, *(torch.randn(size) for _ in TAKEN))
    count, times = len(TAKEN), len(sizes)
    if dynamic:
        assert_regions(compiled, ("softmax", "openmp", count, count * times))
    else:  # what is between products is attention
        assert_regions(
            compiled, ("attention", "mha", 1, 1), ("softmax", "openmp", count - 1, count - 1)
        )


def test_left() -> None:
    """Beside one that is taken."""
    model = of_each({**LEFT, "taken": TAKEN["softmax"]})
    compiled = compile_at("O2", model)
    hold(compiled, model, *(torch.randn(3, 20, 20) for _ in (*LEFT, "taken")))
    assert_regions(compiled, ("softmax", "openmp", 1, 1))


def test_half_precision_is_left() -> None:
    """Inductor widens it in its own loop; it would be written as floats for ours."""
    x = torch.randn(30, 50, dtype=torch.bfloat16)
    compiled = compile_at("O2", lambda x: torch.softmax(x, -1))
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1))
    assert_regions(compiled)


@pytest.mark.parametrize("logarithm", [False, True])
def test_gradients(logarithm: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (torch.log_softmax if logarithm else torch.softmax)(x @ y, -1)

    torch.manual_seed(0)
    parts = [torch.randn(32, 16), torch.randn(16, 24)]
    toward = torch.randn(32, 24)
    found = []
    compiled = compile_at("O2", fn)
    for call, wide in ((compiled, False), (fn, False), (fn, True)):
        given = [(part.double() if wide else part).clone().requires_grad_() for part in parts]
        out = call(*given)
        out.backward(toward.to(out.dtype))
        found.append([out.detach(), *(part.grad for part in given)])
    for got, eager, exact in zip(*found, strict=True):
        assert_contract(got, eager, exact, "gradients")
    assert_regions(compiled, ("softmax", "openmp", 1, 1))
