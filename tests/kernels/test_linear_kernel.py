"""openmp_linear, called directly: act(x @ weight.T + bias + before) * times + after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor

# In the order of the operator's numbers, with the two numbers that each is given.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "none": (lambda t: t, 0, 0),
    "relu": (functional.relu, 0, 0),
    "gelu_erf": (functional.gelu, 0, 0),
    "gelu_tanh": (lambda t: functional.gelu(t, approximate="tanh"), 0, 0),
    "silu": (functional.silu, 0, 0),
    "tanh": (torch.tanh, 0, 0),
    "sigmoid": (torch.sigmoid, 0, 0),
    "hardswish": (functional.hardswish, 0, 0),
    "hardsigmoid": (functional.hardsigmoid, 0, 0),
    "clamp": (lambda t: functional.hardtanh(t, -0.5, 0.75), -0.5, 0.75),
    "leaky_relu": (lambda t: functional.leaky_relu(t, 0.2), 0.2, 0),
    "elu": (lambda t: functional.elu(t, 1.5), 1.5, 0),
}

SIZES = [
    (1, 1, 1), (1, 7, 3), (2, 64, 64), (3, 17, 33), (5, 1, 9), (7, 129, 65), (33, 31, 100),
    (65, 300, 17), (130, 513, 129), (1, 600, 257), (0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0),
    (23, 1024, 70), (200, 4096, 130),  # rows that crowd the cache, in place or copied
]  # fmt: skip
RANKS = [(13,), (3, 13), (2, 3, 13), (2, 1, 3, 13), (2, 0, 13)]


def compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    times: Tensor | None = None,
    after: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    number = list(ACTIVATIONS).index(activation)
    return kernels().openmp_linear(x, weight, bias, before, times, after, number, a, b)


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    times: Tensor | None = None,
    after: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    out = functional.linear(x, weight, bias)
    out = out if before is None else out + before
    out = ACTIVATIONS[activation][0](out)
    out = out if times is None else out * times
    return out if after is None else out + after


def check(where: str, *args: Tensor | None, **kwargs: Any) -> Tensor:
    got = compute(*args, **kwargs)
    wide = [None if t is None else t.double() for t in args]
    wider = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    assert_contract(got, expected(*args, **kwargs), expected(*wide, **wider), where)
    assert got.is_contiguous()
    return got


@pytest.mark.parametrize(("m", "k", "n"), SIZES, ids=str)
def test_sizes(m: int, k: int, n: int) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    check("without a bias", x, weight)
    check("with a bias", x, weight, torch.randn(n))
    beside = [torch.randn(m, n) for _ in range(3)]
    check("with everything", x, weight, torch.randn(n), *beside, activation="silu")


@pytest.mark.parametrize("n", [16, 24, 40, 48])
def test_sums_of_every_depth_in_tiles_of_every_height(n: int) -> None:
    """Where the innermost loop takes fours of products by hand, up to three are left over."""
    for m in range(1, 14):
        for k in (*range(1, 10), 64, 67, 258):
            check(f"{m} x {k} x {n}", torch.randn(m, k), torch.randn(n, k), torch.randn(n))


@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
def test_more_columns_than_a_thread_works_on_at_once(activation: str) -> None:
    """And more rows, and deeper: blocks of all three, each with others behind it."""
    m, k, n = 350, 530, 850
    x, weight, beside = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    check("all blocks", x, weight, torch.randn(n), beside, activation=activation)


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_ranks(shape: tuple[int, ...]) -> None:
    weight, beside = torch.randn(5, 13), [torch.randn(*shape[:-1], 5) for _ in range(3)]
    check(f"{shape}", torch.randn(shape), weight, torch.randn(5), *beside, activation="relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(activation: str) -> None:
    """Each activation with each choice of what stands around it, where values are far out too."""
    x, weight = torch.randn(19, 23) * torch.logspace(-3, 2, 19)[:, None], torch.randn(37, 23)
    for given in itertools.product((False, True), repeat=4):
        bias, *beside = (
            (torch.randn(37) if one == 0 else torch.randn(19, 37)) if wanted else None
            for one, wanted in enumerate(given)
        )
        check(f"{activation} {given}", x, weight, bias, *beside, activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(activation: str) -> None:
    """What is not finite, the largest and the smallest numbers go through as in eager."""
    special = [float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 1e-40, -0.0, 88.8, -88.8]
    if activation == "gelu_erf":  # of infinities eager makes NaN: oneDNN multiplies 0 by them
        special = [number for number in special if not math.isinf(number)]
    numbers = torch.tensor(special).repeat(6)[:37]
    x, weight = torch.eye(37), torch.eye(37)
    x.diagonal().copy_(torch.where(numbers.isfinite(), numbers, 1.0))
    check("in x", x, weight, activation=activation)
    zeros, rows = torch.zeros(19, 37), numbers.expand(19, 37)
    check("in the bias", torch.zeros(19, 37), weight, numbers, activation=activation)
    check("before", zeros, weight, None, rows, activation=activation)
    check("times", zeros + 1, weight, None, None, rows, activation=activation)
    check("after", zeros, weight, None, None, None, rows, activation=activation)
    one_row = torch.randn(19, 37)
    one_row[3, 5] = float("nan")
    got = check("in one row of x", one_row, weight, activation=activation)
    assert got.isnan().any(1).nonzero().flatten().tolist() == [3], "NaN has left its row"


def test_strides() -> None:
    """What does not lie row by row, in any operand."""
    wide = torch.randn(50, 60)
    x, weight, bias = wide[:, 1:41:2], torch.randn(20, 33).t(), torch.randn(66)[::2]
    beside = [torch.randn(33, 50).t(), wide[:, 3:36], torch.randn(33).expand(50, 33)]
    check("strided", x, weight, bias, *beside, activation="tanh")
    check("rows that are one row", torch.randn(20).expand(50, 20), weight, bias)
    check("every other row of the weight", x, torch.randn(66, 20)[::2], bias)
    check("3-D, transposed", torch.randn(5, 7, 20).transpose(0, 1), weight, bias)


def test_nothing_outside_of_the_operands_is_read() -> None:
    """Each operand stands between NaNs."""

    def between(*shape: int) -> Tensor:
        memory = torch.full((torch.Size(shape).numel() + 2 * 256,), float("nan"))
        inside = memory[256:-256].view(shape)
        return inside.copy_(torch.randn(shape))

    for m, k, n in [(1, 3, 5), (17, 33, 31), (6, 64, 48), (2, 100, 7)]:
        beside = [between(m, n) for _ in range(3)]
        got = check(
            f"{m} {k} {n}", between(m, k), between(n, k), between(n), *beside, activation="elu"
        )
        assert not got.isnan().any()


@pytest.mark.parametrize("m", [1, 2, 31, 300])
def test_the_thread_count_changes_no_bit(m: int) -> None:
    x, weight, bias = torch.randn(m, 301), torch.randn(211, 301), torch.randn(211)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(compute(x, weight, bias, activation="gelu_erf"))
    for other in found[1:]:
        assert_bit_identical(other, found[0], f"{m} rows")


def test_calls_from_several_threads() -> None:
    """Packing included: nobody has seen these weights before."""
    x, weights = torch.randn(40, 100), [torch.randn(70, 100) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: compute(x, weight), weights * 8))
    for got, weight in zip(found, weights * 8, strict=True):
        assert_bit_identical(got, compute(x, weight), "from another thread")


def test_half_precision_weights() -> None:
    """The weight is widened when it is packed; x comes widened."""
    x = torch.randn(9, 40)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        weight, bias = torch.randn(30, 40).to(dtype), torch.randn(30).to(dtype)
        got = compute(x, weight, bias)
        assert_contract(
            got,
            expected(x, weight.float(), bias.float()),
            expected(x.double(), weight.double(), bias.double()),
            str(dtype),
        )
