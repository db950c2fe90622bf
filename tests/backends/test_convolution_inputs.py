"""What generated code computes for a convolution is written channels last, so nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_dispatch import profiling
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of
from tests.support.regions import hold, region_rows

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def copies(compiled: Any, *inputs: Tensor) -> int:
    with torch.no_grad(), torch.profiler.profile(activities=profiling.activities()) as profile:
        compiled(*inputs)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


def last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def normed(self: Any, x: Tensor) -> Tensor:
    """Written in rows by Inductor, if it may choose."""
    return self.second(self.norm(self.first(x))).relu()


def with_residual(self: Any, x: Tensor) -> Tensor:
    x = self.norm(self.first(x))
    return x + self.second(functional.gelu(self.norm(x)))


def from_tokens(self: Any, x: Tensor) -> Tensor:
    tokens = self.norm(x).flatten(2).transpose(1, 2).softmax(-1)
    return self.second(tokens.transpose(1, 2).reshape(x.shape))


def joined(self: Any, x: Tensor) -> Tensor:
    first = self.first(x)
    return self.second(first[:, :16].contiguous().repeat(1, 2, 1, 1) + first.flip(2))


FUNCTIONS = [normed, with_residual, from_tokens, joined]


def model_of(function: Any) -> nn.Module:
    layers = {"first": nn.Conv2d(32, 32, 3, 1, 1), "second": nn.Conv2d(32, 32, 3, 1, 1)}
    return Of(function, norm=nn.GroupNorm(1, 32), **layers)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_images_that_are_computed_are_not_copied(function: Any) -> None:
    model, x = model_of(function), last(torch.randn(2, 32, 24, 20))
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert {row[:2] for row in region_rows(compiled)} == {("convolution", "openmp")}
    assert not copies(compiled, x)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_images_that_lie_in_rows_are_copied_once(function: Any) -> None:
    model, x = model_of(function), torch.randn(2, 32, 24, 20)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert copies(compiled, x) <= 1


def test_transposed_convolutions() -> None:
    layers = {"first": nn.Conv2d(32, 32, 3, 1, 1), "second": nn.ConvTranspose2d(32, 8, 4, 2, 1)}
    model = Of(normed, norm=nn.GroupNorm(1, 32), **layers)
    x = last(torch.randn(2, 32, 24, 20))
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert not copies(compiled, x)


def test_lines() -> None:
    layers = {"first": nn.Conv1d(32, 32, 3, 1, 1), "second": nn.Conv1d(32, 16, 3)}
    model = Of(normed, norm=nn.GroupNorm(4, 32), **layers)
    x = torch.randn(2, 32, 200)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert copies(compiled, x) <= 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_of_one_lie_anyhow(dynamic: bool) -> None:
    model = model_of(with_residual)
    compiled = compile_at("O2", model, dynamic=dynamic)
    for shape in ((1, 32, 1, 1), (1, 32, 1, 7), (3, 32, 5, 1)):
        hold(compiled, model, torch.randn(shape))
