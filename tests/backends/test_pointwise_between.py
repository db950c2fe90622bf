"""Sums, products, activations and norms of images between convolutions: part of their one call.

Each case stands between convolutions of ours, so that its operands are made in the same call. The
numbers, how often convolutions ran, and in how many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.backends.test_convolution_groups import calls
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import used
from tests.support.regions import assert_regions, details, hold, no_cached_graphs

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies(), no_cached_graphs():
        yield


class Between(nn.Module):
    """Three images that nobody else reads, something that is made of them, and a convolution of it
    that looks around each pixel, so that it cannot do part of the work while it reads."""

    def __init__(self, function: Callable[..., Tensor], channels: int) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(3, channels, 3, 1, 1)
        self.two = nn.Conv2d(channels, channels, 1)
        self.norm, self.other = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.each = nn.Parameter(torch.randn(channels, 1, 1))
        self.flat = nn.Parameter(torch.randn(channels))
        self.last = nn.Conv2d(channels, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = functional.max_pool2d(self.first(x), 3, 1, 1)
        b = functional.avg_pool2d(a, 3, 1, 1)
        c = functional.max_pool2d(self.two(b), 3, 1, 1)
        return self.last(self.function(self, a, b, c))


CASES: dict[str, Callable[..., Tensor]] = {
    "sum": lambda m, a, b, c: a + c,
    "three": lambda m, a, b, c: a + b + c,
    "sum and ReLU": lambda m, a, b, c: functional.relu(a + c),
    "ReLU and sum": lambda m, a, b, c: a + functional.relu(c),
    "three and SiLU": lambda m, a, b, c: functional.silu(a + b + c),
    "product": lambda m, a, b, c: a * c,
    "product of a sum": lambda m, a, b, c: (a + c) * b,
    "sum of a product": lambda m, a, b, c: a + c * b,
    "gate": lambda m, a, b, c: a * torch.sigmoid(c),
    "gate of itself": lambda m, a, b, c: c * torch.sigmoid(c),
    "square": lambda m, a, b, c: c * c,
    "twice": lambda m, a, b, c: c + c,
    "norm and residual": lambda m, a, b, c: m.norm(c) + a,
    "norm, residual, ReLU": lambda m, a, b, c: functional.relu(m.norm(c) + a),
    "two norms": lambda m, a, b, c: m.norm(c) + m.other(a),
    "norm behind a sum": lambda m, a, b, c: m.norm(a + c),
    "norm behind an activation": lambda m, a, b, c: m.norm(functional.gelu(a + c)),
    "hard swish": lambda m, a, b, c: functional.hardswish(m.norm(c)),
    "leaky": lambda m, a, b, c: functional.leaky_relu(a + c, 0.2),
    "ELU": lambda m, a, b, c: functional.elu(a + c, 0.7) * b,
    "clamped": lambda m, a, b, c: functional.relu6(a + c),
    "factors": lambda m, a, b, c: a * c.mean((2, 3), keepdim=True),
    "factors and residual": lambda m, a, b, c: a * c.mean((2, 3), keepdim=True) + b,
    "one weight for all": lambda m, a, b, c: m.one * c,
    "weights of channels": lambda m, a, b, c: a + m.each * c,
    "reshaped weights": lambda m, a, b, c: c * m.flat.reshape(1, -1, 1, 1) + a,
    "scale and shift": lambda m, a, b, c: functional.relu(c * m.one + m.each) + a,
    "shift alone": lambda m, a, b, c: c + m.each,
    "two scales": lambda m, a, b, c: c * m.one * m.each,
    "one weight as a scale and as a shift": lambda m, a, b, c: torch.tanh(c * m.each) + m.each,
    "norm and scale": lambda m, a, b, c: m.norm(c) * m.each + a,
    "read twice": lambda m, a, b, c: (a + c) * functional.relu(a + c) + functional.tanh(b),
}


def held_in_one_call(model: nn.Module, x: Tensor, convolutions: int) -> Any:
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", convolutions, 2 * convolutions))
    return compiled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("channels", [24, 5], ids=["24 channels", "5 channels"])
@pytest.mark.parametrize("function", CASES.values(), ids=CASES.keys())
def test_between_convolutions(function: Callable[..., Tensor], channels: int) -> None:
    x = torch.randn(2, 3, 19, 17)
    compiled = held_in_one_call(used(Between(function, channels), x), x, 3)
    (detail,) = details(compiled, "convolution")
    assert {"pointwise", "norm_before"} & set(detail.removeprefix("with ").split(", ")), detail


def test_weights_that_change_are_read_again() -> None:
    x = torch.randn(1, 3, 19, 17)
    model = used(Between(CASES["scale and shift"], 24), x)
    compiled = held_in_one_call(model, x, 3)
    with torch.no_grad():
        model.one.fill_(-3.0)
        model.each.add_(1.0)
    hold(compiled, model, x)


@pytest.mark.parametrize("size", [(1, 24, 9, 11), (1, 1, 9, 11), (24, 9, 1), (24, 1, 11)])
def test_weights_of_other_shapes_stay(size: tuple[int, ...]) -> None:
    """Of each pixel, of each line or of each column. Numbers of one channel are for all."""
    x = torch.randn(1, 3, 9, 11)
    model = Between(lambda m, a, b, c: c * m.odd, 24)
    model.odd = nn.Parameter(torch.randn(size))
    model = used(model, x)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert len(calls(compiled, x)) > 1


def test_a_factor_that_the_caller_gives_stays() -> None:
    """It is another one in every call: nothing is made ready from it."""
    x, factor = torch.randn(1, 3, 9, 11), torch.randn(24, 1, 1)
    parts = Between(lambda m, a, b, c: c * m.one, 24)

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            return self.parts.last(functional.relu(self.parts.first(x)) * factor)

    model = Given().eval()
    compiled = compile_at("O2", model)
    hold(compiled, model, x, factor)
    hold(compiled, model, x, factor * 2)
    assert_regions(compiled, ("convolution", "openmp", 2, 4))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_passes_as_in_eager(odd: float) -> None:
    x = torch.randn(1, 3, 9, 11)
    x[0, 1, 4, 5] = odd
    held_in_one_call(used(Between(CASES["norm, residual, ReLU"], 24), torch.randn_like(x)), x, 3)


class Branches(nn.Module):
    """Summed up from zero on, with activations, so that it does not become one convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, kernel, 1, kernel // 2, bias=False),
                nn.BatchNorm2d(channels),
                *([nn.ReLU()] if kernel > 1 else []),
            )
            for kernel in (1, 3, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Any = 0
        for branch in self.branches:
            out = out + branch(x)
        return functional.relu(out + self.norm(functional.avg_pool2d(x, 3, 1, 1)))


def test_branches_that_are_summed_up_from_zero_on() -> None:
    x = torch.randn(2, 3, 20, 23)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), Branches(24), Branches(24), nn.Conv2d(24, 8, 1))
    held_in_one_call(used(model, x), x, 8)


def test_a_sum_with_zero_that_is_handed_out_is_a_tensor_of_its_own() -> None:
    convolution = nn.Conv2d(3, 8, 3).eval()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = convolution(x)
        return y, y + 0

    compiled, x = compile_at("O2", both), torch.randn(1, 3, 9, 11)
    with torch.no_grad():
        y, z = compiled(x)
        z += 1
        torch.testing.assert_close(y, convolution(x))


class Residual(nn.Module):
    """Two sums behind one convolution, the second of which is read by what comes next, twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)
        self.deep = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.wide(x))
        return self.deep(y) + self.norm(functional.avg_pool2d(y, 3, 1, 1)) + x


def test_the_second_sum_behind_a_convolution() -> None:
    x = torch.randn(1, 3, 20, 23)
    blocks = [Residual(24) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 24, 3), *blocks, nn.Conv2d(24, 8, 1))
    held_in_one_call(used(model, x), x, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """In bfloat16 who computes them depends on the CPU."""
    x = torch.randn(1, 3, 20, 23)
    blocks = [Residual(24) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 24, 3), *blocks, Branches(24), nn.Conv2d(24, 8, 1))
    model = used(model, x).to(dtype)
    compiled = compile_at("O2", model)
    hold(compiled, model, x.to(dtype))
    assert dtype is torch.bfloat16 or calls(compiled, x.to(dtype)) == ["openmp_convolutions"]
