"""openmp_moments and openmp_norm_sums, called directly, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

Tensor = torch.Tensor
# Matrices, lines, images and volumes: tails of vectors, of blocks and of pieces, one of everything,
# more lines than a piece holds, a line of several pieces, many and few channels.
SHAPES = [
    (64, 48), (1, 7), (130, 65), (5000, 3), (3, 300),
    (4, 5, 1), (6, 17, 33), (2, 3, 5000),
    (2, 3, 5, 7), (1, 70, 2, 2), (40, 2, 7, 7), (3, 33, 56, 56), (70, 1, 16, 16),
    (2, 18, 3, 5, 7), (1, 1, 1, 1, 1),
]  # fmt: skip
LAYOUTS = ["as torch lays them", "channels last", "spread"]


def laid(x: Tensor, layout: str) -> Tensor:
    if layout == "channels last" and x.dim() in (4, 5):
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=order)
    return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "spread" else x


def others(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, others(x), correction=0, keepdim=True)


def sums(grad: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    return grad.sum(others(x)), (grad * (x - mean)).sum(others(x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_moments(shape: tuple[int, ...], layout: str, mean: float) -> None:
    x = laid(torch.randn(shape) * 3 + mean, layout)
    assert_contract(kernels().openmp_moments(x), moments(x), moments(x.double()), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(shape: tuple[int, ...], layout: str) -> None:
    grad, x = laid(torch.randn(shape) + 1, layout), laid(torch.randn(shape) + 5, layout)
    mean = moments(x)[1]
    own, wide = sums(grad, x, mean), sums(grad.double(), x.double(), mean.double())
    assert_contract(kernels().openmp_norm_sums(grad, x, mean), own, wide, layout)


def test_operands_that_lie_in_two_ways() -> None:
    grad, x = torch.randn(3, 20, 9, 8), torch.randn(3, 20, 9, 8)
    mean = moments(x)[1]
    for one in LAYOUTS[:2]:
        for other in LAYOUTS[:2]:
            got = kernels().openmp_norm_sums(laid(grad, one), laid(x, other), mean)
            wide = sums(grad.double(), x.double(), mean.double())
            assert_contract(got, sums(grad, x, mean), wide, f"{one}, {other}")


def test_numbers_far_from_zero_and_close_together() -> None:
    x = torch.randn(64, 6, 30, 30).add(1e4)
    var, mean = kernels().openmp_moments(x)
    assert_contract(var, var, moments(x.double())[0], "variance")
    torch.testing.assert_close(var.double(), moments(x.double())[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(mean.double(), moments(x.double())[1], rtol=1e-7, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_as_many_threads_as_you_like(layout: str) -> None:
    x, grad = (laid(torch.randn(32, 40, 28, 28), layout) for _ in range(2))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            var, mean = kernels().openmp_moments(x)
            found.append((var, mean, *kernels().openmp_norm_sums(grad, x, mean)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_bit_identical(other, found[0], "threads")


def test_not_a_number_stays_in_its_channel() -> None:
    for layout in LAYOUTS[:2]:
        x = laid(torch.randn(3, 20, 7, 7), layout)
        x[1, 4, 2, 3] = float("nan")
        x[2, 9, 2, 3] = float("inf")
        for got, own in zip(kernels().openmp_moments(x), moments(x), strict=True):
            assert got.isfinite().equal(own.isfinite()), layout


def test_a_batch_of_nothing() -> None:
    x = torch.randn(0, 5, 3, 3)
    assert all(one.isnan().all() for one in kernels().openmp_moments(x))
    mean = torch.zeros(1, 5, 1, 1)
    assert [one.tolist() for one in kernels().openmp_norm_sums(x, x, mean)] == [[0.0] * 5] * 2
