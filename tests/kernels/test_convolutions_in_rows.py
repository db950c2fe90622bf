"""openmp_convolution and openmp_convolutions that are told to write rows."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.test_convolution_kernel import (
    PROBLEMS,
    Problem,
    compute,
    expected,
    norm_of,
)
from tests.support.numerics import assert_bit_identical, assert_contract

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor

in_rows = functools.partial(compute, rows=True)
MORE = {
    "portions": Problem(5, 40, (61, 60), 24, (3, 3), padding=(1, 1)),
    "portions, by channel": Problem(3, 96, (40, 41), 96, (5, 5), padding=(2, 2), groups=96),
    "a wide product": Problem(2, 400, (9, 30), 70, (1, 1)),
    "one output": Problem(3, 20, (17, 16), 1, (1, 1)),
    "lines, product": Problem(3, 33, (130,), 17, (1,)),
}
every_problem = pytest.mark.parametrize(
    "problem", [*PROBLEMS.values(), *MORE.values()], ids=[*PROBLEMS, *MORE]
)


def last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@every_problem
def test_problems(problem: Problem) -> None:
    x, weight = problem.tensors()
    bias, norm = torch.randn(problem.out), norm_of(problem.out)
    like = in_rows(problem, x, weight)
    beside = tuple(torch.randn_like(like) for _ in range(3))
    for activation in ("none", "relu", "hardswish"):
        operands = (bias, norm, beside)
        got = in_rows(problem, x, weight, *operands, activation)
        assert got.is_contiguous()
        own = expected(problem, x, weight, *operands, activation)
        wide = [tuple(t.double() for t in some) for some in ((x, weight, bias), norm, beside)]
        reference = expected(problem, *wide[0], *wide[1:], activation)  # type: ignore[arg-type]
        assert_contract(got, own, reference, activation)


@every_problem
def test_layouts(problem: Problem) -> None:
    """The image and what lies beside the output may lie either way."""
    x, weight = problem.tensors()
    got = in_rows(problem, x, weight)
    beside = torch.randn_like(got)
    operands = (None, (None,) * 4, (beside, None, None))
    same = in_rows(problem, x, weight, *operands)
    laid = in_rows(problem, x, weight, None, (None,) * 4, (last(beside), None, None))
    assert_bit_identical(laid, same, "the operand channels last")
    if problem.kernel not in ((1, 1), (1,)):  # whose products in rows add in another order
        assert_bit_identical(compute(problem, x, weight), got, "channels last")
        assert_bit_identical(in_rows(problem, last(x), weight), got, "from channels last")
    frame = torch.full((*x.shape[:-1], x.shape[-1] + 2), float("nan"))
    frame[..., 1:-1] = x
    within, plain = (in_rows(problem, one, weight) for one in (frame[..., 1:-1], last(x)))
    assert_bit_identical(within, plain, "within a frame")


@every_problem
def test_the_thread_count_changes_no_bit(problem: Problem) -> None:
    x, weight = problem.tensors()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(in_rows(problem, x, weight, activation="silu"))
    for other in found[1:]:
        assert_bit_identical(other, found[0], "another number of threads")


@pytest.mark.parametrize("name", ["3x3 padded", "pointwise", "depthwise", "1-D"])
def test_special_values(name: str) -> None:
    problem = PROBLEMS[name]
    x, weight = problem.tensors()
    x[0, 0].view(-1)[7], x[-1, -1].view(-1)[-1] = float("nan"), float("inf")
    bias = torch.randn(problem.out)
    bias[0] = float("inf")
    own = expected(problem, x, weight, bias)
    reference = expected(problem, x.double(), weight.double(), bias.double())
    assert_contract(in_rows(problem, x, weight, bias), own, reference, name)


def test_a_bias_that_changes_shows() -> None:
    """It is part of what a product in rows packs."""
    problem = PROBLEMS["pointwise"]
    x, weight = problem.tensors()
    bias = torch.zeros(problem.out)
    before = in_rows(problem, x, weight, bias)
    bias.add_(1)
    torch.testing.assert_close(in_rows(problem, x, weight, bias), before + 1)
