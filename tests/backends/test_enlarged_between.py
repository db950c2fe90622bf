"""Images that are enlarged by repeating pixels, between convolutions: part of their one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.backends.test_convolution_groups import calls
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import used
from tests.support.regions import details, hold, no_cached_graphs
from tests.support.reports import fallbacks_of


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies(), no_cached_graphs():
        yield


class Pyramid(nn.Module):
    """A large image and a small one, brought together by a function, and a convolution of that."""

    def __init__(self, function: Callable[..., Tensor], channels: int, smaller: Any) -> None:
        super().__init__()
        self.function = function
        self.large = nn.Conv2d(3, channels, 3, 1, 1)
        self.small = nn.Conv2d(channels, channels, smaller, smaller)
        self.norm = nn.BatchNorm2d(channels)
        self.last = nn.LazyConv2d(8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = self.large(x).relu()
        return self.last(self.function(self, large, self.small(large)))


def twice(small: Tensor, **more: Any) -> Tensor:
    return functional.interpolate(small, **({"scale_factor": 2, "mode": "nearest"} | more))


CASES: dict[str, Callable[..., Tensor]] = {
    "alone": lambda m, a, b: twice(b),
    "put together": lambda m, a, b: torch.cat([twice(b), a], 1),
    "sum": lambda m, a, b: a + twice(b),
    "product": lambda m, a, b: a * torch.sigmoid(twice(b)),
    "norm": lambda m, a, b: m.norm(twice(b)) + a,
    "exact": lambda m, a, b: a + twice(b, mode="nearest-exact"),
    "to a size": lambda m, a, b: a + twice(b, scale_factor=None, size=a.shape[2:]),
    "some channels": lambda m, a, b: twice(b[:, 2:]) + a[:, 2:],
    "several": lambda m, a, b: twice(b) + twice(functional.max_pool2d(b, 2), scale_factor=4),
}


def held(model: nn.Module, x: Tensor, *, in_one_call: bool = True) -> None:
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    made = calls(compiled, x)
    assert (made == ["openmp_convolutions"]) is in_one_call, made
    (detail,) = details(compiled, "convolution")
    assert ("enlarged" in detail) is in_one_call, detail


@pytest.mark.sampled(3)
@pytest.mark.parametrize("channels", [24, 5])
@pytest.mark.parametrize("name", CASES)
def test_between_convolutions(name: str, channels: int) -> None:
    x = torch.randn(2, 3, 20, 12)
    held(used(Pyramid(CASES[name], channels, 2), x), x)


def test_each_dimension_by_a_factor_of_its_own() -> None:
    x = torch.randn(1, 3, 12, 20)

    def function(m: Pyramid, large: Tensor, small: Tensor) -> Tensor:
        return large + functional.interpolate(small, size=large.shape[2:], mode="nearest")

    held(used(Pyramid(function, 16, (3, 5)), x), x)


@pytest.mark.parametrize(
    "more",
    [
        {"scale_factor": 1.5},
        {"scale_factor": None, "size": (13, 7)},
        {"scale_factor": 0.5},
        {"mode": "bilinear"},
    ],
    ids=str,
)
def test_what_repeats_no_pixel_as_often_as_all_others_stays(more: dict[str, Any]) -> None:
    x = torch.randn(1, 3, 20, 12)
    held(used(Pyramid(lambda m, a, b: twice(b, **more), 16, 2), x), x, in_one_call=False)


def test_other_places_stay() -> None:
    """An index by a tensor of the user's own that is no enlargement; and one that is flipped."""
    x = torch.randn(1, 3, 8, 8)
    for places in (torch.tensor([0, 0, 1, 1, 2, 3, 3, 2]), torch.arange(7, -1, -1)):

        def function(m: Pyramid, a: Tensor, b: Tensor, places: Tensor = places) -> Tensor:
            return a[:, :, places][:, :, :, places]

        held(used(Pyramid(function, 16, 2), x), x, in_one_call=False)


def test_sizes_that_change_stay() -> None:
    model = used(Pyramid(CASES["put together"], 16, 2), torch.randn(1, 3, 8, 8))
    compiled = compile_at("O2", model, dynamic=True)
    for size in (8, 12, 20):
        hold(compiled, model, torch.randn(1, 3, size, 2 * size), where=f"{size}")
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 16, 12)
    model = used(Pyramid(CASES["put together"], 16, 2), x).to(dtype)
    compiled = compile_at("O2", model)
    hold(compiled, model, x.to(dtype))
    assert not fallbacks_of(compiled)
