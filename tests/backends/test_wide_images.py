"""Between convolutions of half precision images stay floats, so that they can be one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.backends.test_convolution_groups import calls
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, in_double, used
from tests.support.regions import assert_regions, hold

Tensor = torch.Tensor
HALF = [torch.bfloat16, torch.float16]
OURS = {"disable": ["mkldnn"]}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def conv(inputs: int, outputs: int, size: int = 1, **more: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, **more), nn.BatchNorm2d(outputs))


def residual(self: Any, x: Tensor) -> Tensor:
    y = functional.max_pool2d(functional.relu(self.one(x)), 3, 2, 1)
    return self.three(functional.relu(self.two(y)) + y)


def squeezed(self: Any, x: Tensor) -> Tensor:
    y = functional.silu(self.one(x))
    return self.three(y * torch.sigmoid(self.two(y.mean((2, 3), keepdim=True))))


def put_together(self: Any, x: Tensor) -> Tensor:
    y = functional.relu(self.one(x))
    left, right = y.split(12, 1)
    return self.three(torch.cat([self.two(y), functional.avg_pool2d(right, 3, 1, 1), left], 1))


def padded(self: Any, x: Tensor) -> Tensor:
    y = functional.relu6(self.one(functional.pad(x, (0, 1, 0, 1))))
    return self.three(self.two(functional.pad(y, (0, 1, 0, 1))))


def normalized(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    return self.three(functional.relu(self.norm(self.two(y) + y)))


CASES: dict[Any, Callable[[], dict[str, nn.Module]]] = {
    residual: lambda: {
        "one": conv(5, 24, 3),
        "two": conv(24, 24, 3, padding=1),
        "three": conv(24, 32),
    },
    squeezed: lambda: {"one": conv(16, 24, 3), "two": nn.Conv2d(24, 24, 1), "three": conv(24, 16)},
    put_together: lambda: {"one": conv(16, 24, 3), "two": conv(24, 16), "three": conv(40, 16, 3)},
    padded: lambda: {
        "one": conv(5, 24, 3, stride=2),
        "two": conv(24, 24, 3, stride=2, groups=24),
        "three": conv(24, 32),
    },
    normalized: lambda: {
        "one": conv(16, 24, 3),
        "two": conv(24, 24),
        "three": conv(24, 16),
        "norm": nn.BatchNorm2d(24),
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", CASES, ids=lambda case: case.__name__)
def test_networks_are_one_call(function: Any, dtype: torch.dtype) -> None:
    parts: Any = CASES[function]()
    x = torch.randn(2, parts["one"][0].in_channels, 30, 31)
    model = used(Of(function, **parts), x).to(dtype)
    compiled = compile_at("O2", model, options=OURS)
    hold(compiled, model, x.to(dtype))
    assert calls(compiled, x.to(dtype)) == ["openmp_convolutions"]
    assert_regions(compiled, ("convolution", "openmp", 3, 6))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_is_returned_too_is_narrowed(dtype: torch.dtype) -> None:
    def returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.max_pool2d(self.one(x), 2)
        return self.two(y), y

    x = torch.randn(1, 16, 20, 20, dtype=dtype)
    model = Of(returned, one=nn.Conv2d(16, 24, 3), two=nn.Conv2d(24, 16, 3)).to(dtype)
    compiled = compile_at("O2", model, options=OURS)
    got = hold(compiled, model, x)
    assert [one.dtype for one in got] == [dtype, dtype]
    assert_regions(compiled, ("convolution", "openmp", 2, 2))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_indices_of_maxima_are_of_the_narrow_image(dtype: torch.dtype) -> None:
    """Of numbers that are equal once they are rounded, the first one is the largest."""

    def indices(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = functional.max_pool2d(self.one(x), 2, return_indices=True)
        return self.two(values), places

    x = torch.randn(1, 16, 20, 20, dtype=dtype)
    model = Of(indices, one=nn.Conv2d(16, 24, 3), two=nn.Conv2d(24, 16, 3)).to(dtype)
    with torch.no_grad():
        model.one.weight.zero_()
        model.one.bias.fill_(1.0)
    compiled = compile_at("O2", model, options=OURS)
    hold(compiled, model, x)


def test_under_autocast() -> None:
    x = torch.randn(2, 5, 30, 31)
    model = used(Of(residual, **CASES[residual]()), x)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled = compile_at("O2", cast, options=OURS)
    with torch.no_grad():
        got, own = compiled(x), cast(x)
    reference = in_double(model, x)
    error, eagers = ((it.double() - reference).norm() for it in (got, own))
    assert got.dtype is own.dtype and error <= 1.1 * eagers
    assert calls(compiled, x) == ["openmp_convolutions"]
