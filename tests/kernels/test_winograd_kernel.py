"""openmp_convolution by Winograd, called directly: the numbers of a direct convolution, and its
infinities. Which convolutions are lowered to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_dispatch
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels, no_cached_graphs

Tensor = torch.Tensor
NOTHING = (None,) * 4

# batch, channels, height, width, outputs, padding; groups and dilation if they are not one
SHAPES = {
    "whole vectors": (1, 32, 12, 14, 48, 1),
    "odd extents": (2, 17, 9, 11, 21, 1),
    "no padding": (2, 16, 8, 7, 16, 0),
    "wide padding": (1, 16, 5, 5, 7, 2),
    "one output pixel": (3, 16, 3, 3, 5, 0),
    "one line": (1, 24, 1, 13, 16, 1),
    "one output channel": (1, 64, 10, 10, 1, 1),
    "many blocks of tiles": (1, 80, 60, 62, 130, 1),
    "few channels": (1, 3, 15, 15, 20, 1),
    "several images": (5, 20, 7, 7, 33, 1),
    "groups of whole vectors": (2, 96, 9, 11, 48, 1, 3),
    "groups that end within vectors": (1, 60, 12, 7, 63, 1, 3),
    "many groups": (1, 272, 10, 10, 272, 1, 17),
    "large groups": (1, 160, 40, 38, 144, 1, 2),
    "dilated": (2, 40, 17, 13, 33, 2, 1, (2, 2)),
    "dilated unevenly, no padding": (1, 16, 14, 19, 20, 0, 1, (3, 2)),
    "dilated beyond the image": (1, 16, 5, 9, 16, 7, 1, (7, 7)),
    "more phases than pixels": (1, 32, 3, 2, 16, 4, 1, (4, 4)),
    "dilated groups": (2, 96, 18, 20, 64, 3, 2, (3, 3)),
    "sums in parts": (1, 1100, 8, 7, 40, 1),
}


@pytest.fixture(autouse=True)
def threads() -> Any:
    kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Geometry:
    padding: int
    groups: int = 1
    dilation: tuple[int, int] = (1, 1)

    def plain(self, *tensors: Tensor) -> Tensor:
        more: Any = {"padding": self.padding, "groups": self.groups, "dilation": self.dilation}
        return functional.conv2d(*tensors, **more)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    norm: tuple[Tensor | None, ...] = NOTHING,
    beside: tuple[Tensor | None, ...] = (None,) * 3,
    activation: str = "none",
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    number = list(ACTIVATIONS).index(activation)
    around, apart = [geometry.padding] * 2, list(geometry.dilation)
    return kernels().openmp_convolution(
        x, weight, bias, *norm, 1e-3, [1, 1], around, apart, geometry.groups, *beside, number,
        a, b, True,
    )  # fmt: skip


def problem(name: str) -> tuple[Tensor, Tensor, Tensor, Geometry]:
    batch, channels, height, width, outputs, *rest = SHAPES[name]
    geometry = Geometry(*rest)
    torch.manual_seed(0)
    x = torch.randn(batch, channels, height, width)
    weight = torch.randn(outputs, channels // geometry.groups, 3, 3)
    return x, weight, torch.randn(outputs), geometry


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str) -> None:
    x, weight, bias, geometry = problem(name)
    own = geometry.plain(x, weight, bias)
    exact = geometry.plain(x.double(), weight.double(), bias.double())
    assert_contract(convolve(x, weight, bias, geometry), own, exact, name)


@pytest.mark.parametrize("shape", ["odd extents", "groups that end within vectors", "dilated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_is_computed_too(activation: str, shape: str) -> None:
    x, weight, bias, geometry = problem(shape)
    images, _, *sizes = x.shape
    channels = weight.shape[0]
    beside = tuple(torch.randn(images, channels, *sizes) for _ in range(3))
    mean, var, gain, offset = (torch.rand(channels) + 0.5 for _ in range(4))

    def expected(kind: torch.dtype) -> Tensor:
        to = [t.to(kind) for t in (x, weight, bias, mean, var, gain, offset, *beside)]
        out = geometry.plain(*to[:3])
        out = functional.batch_norm(out, to[3], to[4], to[5], to[6], False, eps=1e-3)
        return ACTIVATIONS[activation][0](out + to[7]) * to[8] + to[9]

    got = convolve(x, weight, bias, geometry, (gain, offset, mean, var), beside, activation)
    assert_contract(got, expected(torch.float32), expected(torch.float64), activation)


@pytest.mark.parametrize("shape", ["whole vectors", "groups of whole vectors", "dilated"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_no_number_stays_where_it_belongs(bad: float, shape: str) -> None:
    """A tile would spread it to neighbours; a sum of two huge numbers would be infinite."""
    x, weight, bias, geometry = problem(shape)
    x[0, 5, 6, 6] = bad
    x[0, 5, 6, 7] = bad
    weight = weight / 1000
    own, got = geometry.plain(x, weight, bias), convolve(x, weight, bias, geometry)
    assert torch.equal(got.isnan(), own.isnan())
    assert torch.equal(got.isinf(), own.isinf())
    finite = own.isfinite()
    assert finite.any()
    torch.testing.assert_close(got[finite], own[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["many blocks of tiles", "many groups", "large groups"])
def test_threads_do_not_change_a_bit(shape: str) -> None:
    x, weight, bias, geometry = problem(shape)
    torch.set_num_threads(1)
    alone = convolve(x, weight, bias, geometry)
    torch.set_num_threads(3)
    assert_bit_identical(convolve(x, weight, bias, geometry), alone, "three threads")


def test_a_changed_weight_is_seen() -> None:
    x, weight, bias, geometry = problem("whole vectors")
    before = convolve(x, weight, bias, geometry)
    weight.mul_(2)
    after = convolve(x, weight, None, geometry)
    torch.testing.assert_close(after, 2 * (before - bias[:, None, None]), rtol=1e-4, atol=1e-3)


TAKEN = {
    "usual": (nn.Conv2d(32, 32, 3, padding=1), True),
    "strided": (nn.Conv2d(32, 32, 3, 2, 1), False),
    "dilated": (nn.Conv2d(32, 32, 3, 1, 2, 2), True),
    "dilated, small phases": (nn.Conv2d(32, 32, 3, 1, 9, 9), False),
    "grouped": (nn.Conv2d(64, 64, 3, 1, 1, groups=2), True),
    "grouped and strided": (nn.Conv2d(64, 64, 3, 2, 1, groups=2), False),
    "5x5": (nn.Conv2d(32, 32, 5, 1, 2), False),
    "few inputs": (nn.Conv2d(3, 32, 3, 1, 1), False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_which_are_lowered_to_it(name: str) -> None:
    convolution, taken = TAKEN[name]
    model = nn.Sequential(convolution, nn.ReLU()).eval()
    torch.manual_seed(0)
    x = torch.randn(1, convolution.in_channels, 20, 20)
    with torch.no_grad(), no_cached_graphs():
        compiled = torch.compile(model, backend="unified", options={"level": "O2"})
        got = compiled(x)
        exact = model.double()(x.double())
        assert_contract(got, model.float()(x), exact, name)
    (region,) = kernel_dispatch.report(compiled)[0].regions
    assert (region.name, region.provider) == ("convolution", "openmp")
    assert ("winograd" in region.recipes) is taken
