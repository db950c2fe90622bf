"""Sums with zeros and products with ones or zeros: memory of their own, and NaN stays NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import no_cached_graphs
from tests.support.reports import fallbacks_of

HANDED_OUT: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + torch.zeros(8, 8),
    "difference": lambda x: x - torch.zeros_like(x),
    "product": lambda x: (x * torch.ones(8, 8), x.sin()),
    "quotient": lambda x: x / torch.full((8, 8), 1.0),
    "a view of one": lambda x: (x * torch.ones(8, 8)).view(64),
    "of another result": lambda x: (lambda y: (y + torch.zeros(8, 8), y))(x.sin()),
    "of a part": lambda x: x[:4] + torch.zeros(4, 8),
    "of columns": lambda x: x[:, ::2] + torch.zeros(8, 4),
    "of one row": lambda x: x[:1].expand(8, 8) + torch.zeros(8, 8),
}
WITH_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * 0,
    "of something computed": lambda x: x.sin() * 0 + 1,
    "sum": lambda x: (x * 0).sum(),
    "quotient": lambda x: 0 / x + 1,
}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", HANDED_OUT.values(), ids=HANDED_OUT)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_results_lie_in_memory_of_their_own(level: str, function: Callable[..., Any]) -> None:
    compiled = compile_at(level, function)
    x = torch.randn(8, 8)
    got, own = (as_list(run(x)) for run in (compiled, function))
    assert [y.stride() for y in got] == [y.stride() for y in own]
    before = [y.clone() for y in (x, *got[1:])]
    got[0].add_(1)
    torch.testing.assert_close(got[0], own[0] + 1)
    assert all(map(torch.equal, (x, *got[1:]), before))
    assert fallbacks_of(compiled) == []


def as_list(results: Any) -> list[Tensor]:
    return [*results] if isinstance(results, tuple) else [results]


@pytest.mark.parametrize("function", WITH_ZERO.values(), ids=WITH_ZERO)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_times_what_is_no_number(level: str, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 8)
    torch.testing.assert_close(compile_at(level, function)(x), function(x), equal_nan=True)


def test_what_nobody_sees_is_still_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask of zeros inside of attention."""
    from torch._inductor.fx_passes import joint_graph

    kept: list[int] = []

    def remove(module: Any, zeros: Any, ones: Any) -> None:
        kept.append(len(zeros) + len(ones))

    monkeypatch.setattr(joint_graph, "remove_no_ops", remove)
    zeros = torch.zeros
    with no_cached_graphs():
        compile_at("O2", lambda x: (x.sin() + zeros(8, 8)).cos())(torch.randn(8, 8))
        compile_at("O2", lambda x: x.sin().cos() + zeros(8, 8))(torch.randn(8, 8))
    assert kept == [1, 0]
