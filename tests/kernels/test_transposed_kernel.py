"""openmp_transposed_convolution, called directly, against torch's in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from tests.kernels.test_convolution_kernel import norm_of
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor


class Problem(NamedTuple):
    inputs: int
    image: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    more: tuple[int, ...]  # output_padding


PROBLEMS = {
    "doubling": Problem(20, (9, 7), 33, (4, 4), (2, 2), (1, 1), (0, 0)),
    "of one pixel": Problem(17, (1, 1), 40, (4, 4), (1, 1), (0, 0), (0, 0)),
    "long lines": Problem(24, (5, 70), 16, (4, 4), (2, 2), (1, 1), (0, 0)),
    "more lines than a block": Problem(5, (190, 3), 7, (3, 3), (2, 2), (1, 1), (1, 1)),
    "each output from one input": Problem(16, (40, 41), 70, (2, 2), (2, 2), (0, 0), (0, 0)),
    "uneven": Problem(9, (6, 11), 21, (3, 5), (3, 2), (0, 3), (1, 0)),
    "all but the middle is cut off": Problem(6, (4, 5), 5, (5, 5), (2, 2), (4, 4), (1, 1)),
    "a large stride": Problem(8, (5, 5), 4, (16, 16), (8, 8), (4, 4), (3, 5)),
    "many channels": Problem(130, (6, 6), 600, (3, 3), (2, 2), (1, 1), (0, 1)),
    "a line": Problem(12, (37,), 19, (8,), (4,), (2,), (1,)),
    "a line of one": Problem(12, (1,), 19, (8,), (4,), (2,), (1,)),
    "more phases than anything else": Problem(3, (4,), 5, (120,), (100,), (7,), (60,)),
    "fewer outputs than phases": Problem(3, (1, 1), 5, (6, 6), (5, 5), (2, 1), (0, 0)),
    "stride 1": Problem(8, (12, 10), 24, (3, 3), (1, 1), (1, 1), (0, 0)),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def compute(
    problem: Problem, x: Tensor, weight: Tensor, bias: Any, norm: Any, activation: str
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    geometry = (problem.stride, problem.padding, problem.more)
    number = list(ACTIVATIONS).index(activation)
    return kernels().openmp_transposed_convolution(
        x, weight, bias, *norm, 1e-3, *geometry, number, a, b
    )


def expected(
    problem: Problem, x: Tensor, weight: Tensor, bias: Any, norm: Any, activation: str
) -> Tensor:
    convolve: Any = (functional.conv_transpose1d, functional.conv_transpose2d)[x.dim() - 3]
    out = convolve(x, weight, bias, problem.stride, problem.padding, problem.more)
    if norm[2] is not None:
        gain, offset, mean, var = norm
        out = functional.batch_norm(out, mean, var, gain, offset, eps=1e-3)
    return ACTIVATIONS[activation][0](out)


def wide(value: Any) -> Any:
    return None if value is None else value.double()


@every_problem
@pytest.mark.parametrize("how", ["bare", "bias", "norm", "bias and norm"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_numbers(problem: Problem, how: str, count: int) -> None:
    torch.set_num_threads(count)
    x = torch.randn(2, problem.inputs, *problem.image)
    weight = torch.randn(problem.inputs, problem.outputs, *problem.kernel)
    bias = torch.randn(problem.outputs) if "bias" in how else None
    norm = norm_of(problem.outputs) if "norm" in how else (None,) * 4
    activation = {"bare": "none", "bias": "silu", "norm": "relu"}.get(how, "gelu_erf")
    got = compute(problem, x, weight, bias, norm, activation)
    own = expected(problem, x, weight, bias, norm, activation)
    exact = expected(
        problem, x.double(), weight.double(), wide(bias), [*map(wide, norm)], activation
    )
    assert_contract(got, own, exact, how)
    lies = compute(
        problem, x.movedim(1, -1).contiguous().movedim(-1, 1), weight, bias, norm, activation
    )
    assert torch.equal(got, lies), "where the image lies makes no difference"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    problem = PROBLEMS["doubling"]
    x, weight = torch.randn(1, 20, 9, 7), torch.randn(20, 33, 4, 4)
    rest = (None, (None,) * 4, activation)
    exact = expected(problem, x.double(), weight.double(), *rest)
    got, own = compute(problem, x, weight, *rest), expected(problem, x, weight, *rest)
    assert_contract(got, own, exact, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_images_and_no_output(dtype: torch.dtype) -> None:
    """The first gives nothing; the second is an error, as it is in eager."""
    weight = torch.randn(4, 5, 2, 2).to(dtype)
    none = Problem(4, (3, 3), 5, (2, 2), (2, 2), (0, 0), (0, 0))
    nothing = compute(none, torch.empty(0, 4, 3, 3), weight, None, (None,) * 4, "none")
    assert nothing.shape == (0, 5, 6, 6)
    cut_off = Problem(4, (1, 1), 5, (2, 2), (1, 1), (1, 1), (0, 0))
    with pytest.raises(RuntimeError, match="an output of 0x0"):
        compute(cut_off, torch.randn(1, 4, 1, 1), weight, None, (None,) * 4, "none")


def test_what_is_not_a_number_stays_where_it_is() -> None:
    x, weight = torch.randn(1, 4, 6, 6), torch.randn(4, 5, 4, 4)
    x[0, 2, 3, 3] = torch.nan
    got = compute(PROBLEMS["doubling"], x, weight, None, (None,) * 4, "none")
    own = expected(PROBLEMS["doubling"], x, weight, None, (None,) * 4, "none")
    assert torch.equal(got.isnan(), own.isnan())


def test_one_weight_with_other_strides_and_as_a_convolution() -> None:
    """Packed forms of one weight do not stand for each other."""
    weight, x = torch.randn(8, 8, 4, 4), torch.randn(1, 8, 9, 9)
    plain = (None, (None,) * 4, "none")
    for stride in (1, 2, 4, 1, 2):
        problem = Problem(8, (9, 9), 8, (4, 4), (stride, stride), (1, 1), (0, 0))
        got = compute(problem, x, weight, *plain)
        torch.testing.assert_close(got, expected(problem, x, weight, *plain))
        convolved = kernels().openmp_convolution(
            x, weight, None, *[None] * 4, 0.0, [stride, stride], [1, 1], [1, 1], 1,
            None, None, None, 0, 0.0, 0.0,
        )  # fmt: skip
        torch.testing.assert_close(convolved, functional.conv2d(x, weight, None, stride, 1))
