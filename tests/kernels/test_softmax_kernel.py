"""openmp_softmax, called directly: rows of any length, masked and infinite numbers, threads."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor
# Around a vector, four of them, and the length from which rows are taken one by one.
SIZES = (1, 3, 4, 15, 16, 17, 49, 63, 64, 65, 91, 128, 1000, 1024, 1025, 5000)
ROWS = (1, 2, 15, 16, 17, 40)
BOTH = pytest.mark.parametrize("logarithm", [False, True], ids=["softmax", "log"])


def computed(x: Tensor, logarithm: bool) -> Tensor:
    found: Tensor = kernels().openmp_softmax(x, logarithm)
    return found


def by_torch(x: Tensor, logarithm: bool) -> Tensor:
    return torch.log_softmax(x, -1) if logarithm else torch.softmax(x, -1)


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_length(size: int, logarithm: bool) -> None:
    torch.manual_seed(size)
    for rows in ROWS:
        x = torch.randn(rows, size) * 4
        exact, got = by_torch(x.double(), logarithm), computed(x, logarithm)
        eager = (by_torch(x, logarithm).double() - exact).abs().max()
        assert (got.double() - exact).abs().max() <= 2 * eager + 3e-7 * exact.abs().max()


@BOTH
def test_a_row_does_not_depend_on_its_company(logarithm: bool) -> None:
    """Bit for bit: not on the rows beside it, nor on how many threads share them."""
    torch.manual_seed(0)
    x = torch.randn(7, 123, 391)
    torch.set_num_threads(1)
    got = computed(x, logarithm)
    torch.testing.assert_close(got, by_torch(x, logarithm))
    torch.set_num_threads(3)
    assert computed(x, logarithm).equal(got)
    for rows in (slice(0, 1), slice(5, 40), slice(60, 76)):
        assert computed(x[3, rows], logarithm).equal(got[3, rows])


@BOTH
def test_what_is_hidden_and_what_is_infinite(logarithm: bool) -> None:
    """A row without any finite number has no answer; one with a hidden one does."""
    for size in (5, 40, 2000):
        x = torch.randn(6, size)
        x[0, 1:] = -math.inf
        x[1] = -math.inf
        x[2, 3] = math.inf
        x[3, size - 1] = math.nan
        x[4, 0] = -1e4
        x[5, 2] = 95.0  # the others become almost zero, as in eager: denormal numbers
        got, expected = computed(x, logarithm), by_torch(x, logarithm)
        torch.testing.assert_close(got, expected, equal_nan=True)
        tiny = (expected[5] > 0) & (expected[5] < 1e-37) if not logarithm else got[5] == 9
        assert got[5][tiny].gt(0).all()


@BOTH
def test_layouts_and_nothing(logarithm: bool) -> None:
    x = torch.randn(60, 30)
    for view in (x.t(), x[::2, ::3], x[:, 4:21], x[0], x.reshape(3, 20, 30).transpose(0, 1)):
        got = computed(view, logarithm)
        assert got.is_contiguous()
        torch.testing.assert_close(got, by_torch(view, logarithm))
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        assert computed(torch.empty(shape), logarithm).shape == shape
