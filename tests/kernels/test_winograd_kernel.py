"""openmp_convolution by Winograd, called directly: the numbers of a direct convolution, and its
infinities. Which convolutions are lowered to it."""

from __future__ import annotations

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

# batch, channels, height, width, outputs, padding
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
}


@pytest.fixture(autouse=True)
def threads() -> Any:
    kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: int,
    norm: tuple[Tensor | None, ...] = NOTHING,
    beside: tuple[Tensor | None, ...] = (None,) * 3,
    activation: str = "none",
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    number = list(ACTIVATIONS).index(activation)
    geometry = ([1, 1], [padding, padding], [1, 1], 1)
    return kernels().openmp_convolution(
        x, weight, bias, *norm, 1e-3, *geometry, *beside, number, a, b, True
    )


def problem(name: str) -> tuple[Tensor, Tensor, Tensor, int]:
    batch, channels, height, width, outputs, padding = SHAPES[name]
    torch.manual_seed(0)
    x = torch.randn(batch, channels, height, width)
    return x, torch.randn(outputs, channels, 3, 3), torch.randn(outputs), padding


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str) -> None:
    x, weight, bias, padding = problem(name)
    own = functional.conv2d(x, weight, bias, padding=padding)
    exact = functional.conv2d(x.double(), weight.double(), bias.double(), padding=padding)
    assert_contract(convolve(x, weight, bias, padding), own, exact, name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_is_computed_too(activation: str) -> None:
    x, weight, bias, padding = problem("odd extents")
    beside = tuple(torch.randn(2, 21, 9, 11) for _ in range(3))
    mean, var, gain, offset = (torch.rand(21) + 0.5 for _ in range(4))

    def expected(kind: torch.dtype) -> Tensor:
        to = [t.to(kind) for t in (x, weight, bias, mean, var, gain, offset, *beside)]
        out = functional.conv2d(*to[:3], padding=padding)
        out = functional.batch_norm(out, to[3], to[4], to[5], to[6], False, eps=1e-3)
        return ACTIVATIONS[activation][0](out + to[7]) * to[8] + to[9]

    got = convolve(x, weight, bias, padding, (gain, offset, mean, var), beside, activation)
    assert_contract(got, expected(torch.float32), expected(torch.float64), activation)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_no_number_stays_where_it_belongs(bad: float) -> None:
    """A tile would spread it to neighbours; a sum of two huge numbers would be infinite."""
    x, weight, bias, padding = problem("whole vectors")
    x[0, 5, 6, 6] = bad
    x[0, 5, 6, 7] = bad
    weight = weight / 1000
    got, own = convolve(x, weight, bias, padding), functional.conv2d(x, weight, bias, padding=1)
    assert torch.equal(got.isnan(), own.isnan())
    assert torch.equal(got.isinf(), own.isinf())
    finite = own.isfinite()
    assert finite.any()
    torch.testing.assert_close(got[finite], own[finite], rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_bit() -> None:
    x, weight, bias, padding = problem("many blocks of tiles")
    torch.set_num_threads(1)
    alone = convolve(x, weight, bias, padding)
    torch.set_num_threads(3)
    assert_bit_identical(convolve(x, weight, bias, padding), alone, "three threads")


def test_a_changed_weight_is_seen() -> None:
    x, weight, bias, padding = problem("whole vectors")
    before = convolve(x, weight, bias, padding)
    weight.mul_(2)
    after = convolve(x, weight, None, padding)
    torch.testing.assert_close(after, 2 * (before - bias[:, None, None]), rtol=1e-4, atol=1e-3)


TAKEN = {
    "usual": (nn.Conv2d(32, 32, 3, padding=1), True),
    "strided": (nn.Conv2d(32, 32, 3, 2, 1), False),
    "dilated": (nn.Conv2d(32, 32, 3, 1, 2, 2), False),
    "grouped": (nn.Conv2d(64, 64, 3, 1, 1, groups=2), False),
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
