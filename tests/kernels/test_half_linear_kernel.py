"""openmp_linear_half, called directly: act(x @ weight.T + bias + before) * times + after."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.conftest import Halves
from tests.kernels.test_linear_kernel import ACTIVATIONS, SIZES, expected
from tests.support.modules import in_double
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    graph_reports,
    kernels,
    no_cached_graphs,
)

Tensor = torch.Tensor
# Over several parts of k, blocks of rows and strips of panels; k odd and even at each place.
LARGE = [(1, 3073, 48), (9, 6145, 70), (97, 3072, 65), (200, 770, 33), (330, 31, 200)]
RANKS = [(13,), (3, 13), (2, 3, 13), (2, 1, 3, 14), (2, 0, 13)]


def compute(
    x: Tensor,
    weight: Tensor,
    *beside: Tensor | None,
    activation: str = "none",
    in_out: bool = False,
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    number = list(ACTIVATIONS).index(activation)
    bias, before, times, after = (*beside, *[None] * (4 - len(beside)))
    operator = kernels().openmp_linear_half
    return operator(x, weight, bias, before, times, after, number, a, b, in_out)


def check(where: str, *args: Tensor | None, **kwargs: Any) -> Tensor:
    got = compute(*args, **kwargs)  # type: ignore[arg-type]
    wide = [None if t is None else t.double() for t in args]
    assert_contract(got, expected(*args, **kwargs), expected(*wide, **kwargs), where)  # type: ignore[arg-type]
    assert got.is_contiguous()
    return got


@pytest.mark.parametrize(("m", "k", "n"), SIZES + LARGE, ids=str)
def test_sizes(m: int, k: int, n: int, half: Halves) -> None:
    x, weight = half.randn(m, k), half.randn(n, k)
    check("without a bias", x, weight)
    check("with a bias", x, weight, half.randn(n))
    beside = [half.randn(m, n) for _ in range(3)]
    check("with everything", x, weight, half.randn(n), *beside, activation="silu")


@pytest.mark.parametrize("k", [1, 2, 15, 16, 33, 768, 4097])
def test_one_rounding(k: int, half: Halves) -> None:
    """Small integers: every sum is exact in float32, so the result is the nearest half."""
    x, weight = torch.randint(-8, 9, (70, k)), torch.randint(-8, 9, (83, k))
    exact = (x @ weight.t()).float().to(half.dtype)
    assert_bit_identical(compute(x.to(half.dtype), weight.to(half.dtype)), exact, f"k = {k}")


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_ranks(shape: tuple[int, ...], half: Halves) -> None:
    weight, beside = half.randn(5, shape[-1]), [half.randn(*shape[:-1], 5) for _ in range(3)]
    check(f"{shape}", half.randn(*shape), weight, half.randn(5), *beside, activation="relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(activation: str, half: Halves) -> None:
    """Each activation with each choice of what stands around it, where values are far out too."""
    x, weight = (
        (half.randn(19, 23) * torch.logspace(-3, 2, 19)[:, None]).to(half.dtype),
        half.randn(37, 23),
    )
    for given in itertools.product((False, True), repeat=4):
        beside = [
            (half.randn(37) if one == 0 else half.randn(19, 37)) if wanted else None
            for one, wanted in enumerate(given)
        ]
        check(f"{activation} {given}", x, weight, *beside, activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(activation: str, half: Halves) -> None:
    """What is not finite, the largest and the smallest numbers go through as in eager."""
    inf, large = math.inf, half.large
    special = [math.nan, inf, -inf, large, -large, 1e-40, 1e-7, -0.0, 88.8, -88.8]
    if activation == "gelu_erf":  # of infinities eager makes NaN: oneDNN multiplies 0 by them
        special = [number for number in special if not math.isinf(number)]
    numbers = torch.tensor(special, dtype=half.dtype).repeat(6)[:37]
    x, weight = torch.eye(37, dtype=half.dtype), torch.eye(37, dtype=half.dtype)
    x.diagonal().copy_(torch.where(numbers.isfinite(), numbers, 1.0))
    check("in x", x, weight, activation=activation)
    zeros, rows = torch.zeros(19, 37, dtype=half.dtype), numbers.expand(19, 37)
    check("in the bias", zeros, weight, numbers, activation=activation)
    check("before", zeros, weight, None, rows, activation=activation)
    check("times", zeros + 1, weight, None, None, rows, activation=activation)
    check("after", zeros, weight, None, None, None, rows, activation=activation)
    one_row = half.randn(19, 37)
    one_row[3, 5] = float("nan")
    # Not compared with eager, in which the NaN reaches row 2 as well (oneDNN 3.12 with AMX).
    got = compute(one_row, weight, activation=activation)
    assert got.isnan().any(1).nonzero().flatten().tolist() == [3], "NaN has left its row"
    one_row[3, 5] = 1
    others = compute(one_row, weight, activation=activation)
    assert_bit_identical(got[torch.arange(19) != 3], others[torch.arange(19) != 3], activation)


def test_infinities_in_the_operands(half: Halves) -> None:
    x, weight = half.randn(20, 33), half.randn(40, 33)
    x[4, 32] = float("inf")  # the last of an odd k, which has a zero beside it
    weight[7, 0] = -float("inf")
    check("infinities", x, weight)


def test_strides(half: Halves) -> None:
    """What does not lie row by row, in any operand."""
    wide = half.randn(50, 60)
    x, weight, bias = wide[:, 1:41:2], half.randn(20, 33).t(), half.randn(66)[::2]
    beside = [half.randn(33, 50).t(), wide[:, 3:36], half.randn(33).expand(50, 33)]
    check("strided", x, weight, bias, *beside, activation="tanh")
    check("rows that are one row", half.randn(20).expand(50, 20), weight, bias)
    check("every other row of the weight", x, half.randn(66, 20)[::2], bias)
    check("3-D, transposed", half.randn(5, 7, 20).transpose(0, 1), weight, bias)
    check("at an odd address", half.randn(50 * 20 + 1)[1:].view(50, 20), weight, bias)


@pytest.mark.parametrize("k", [24, 25])
def test_weights_stored_the_other_way_round(k: int, half: Halves) -> None:
    x, weight, bias = half.randn(30, k), half.randn(k, 51), half.randn(51)
    got = compute(x, weight, bias, activation="gelu_tanh", in_out=True)
    plain = compute(x, weight.t().contiguous(), bias, activation="gelu_tanh")
    assert_bit_identical(got, plain, "in, out")


def test_nothing_outside_of_the_operands_is_read(half: Halves) -> None:
    """Each operand stands between NaNs."""

    def between(*shape: int) -> Tensor:
        memory = torch.full((torch.Size(shape).numel() + 2 * 256,), float("nan"), dtype=half.dtype)
        return memory[256:-256].view(shape).copy_(half.randn(*shape))

    for m, k, n in [(1, 3, 5), (17, 33, 31), (6, 64, 48), (2, 100, 7), (5, 1, 1)]:
        beside = [between(m, n) for _ in range(3)]
        got = check(
            f"{m} {k} {n}", between(m, k), between(n, k), between(n), *beside, activation="elu"
        )
        assert not got.isnan().any()


@pytest.mark.parametrize("k", [301, 6400])
@pytest.mark.parametrize("m", [1, 2, 31, 300])
def test_the_thread_count_changes_no_bit(m: int, k: int, half: Halves) -> None:
    x, weight, bias = half.randn(m, k), half.randn(211, k), half.randn(211)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(compute(x, weight, bias, activation="gelu_erf"))
    for other in found[1:]:
        assert_bit_identical(other, found[0], f"{m} rows")


def test_calls_from_several_threads(half: Halves) -> None:
    """Packing included: nobody has seen these weights before."""
    x, weights = half.randn(40, 100), [half.randn(70, 100) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weight: compute(x, weight), weights * 8))
    for got, weight in zip(found, weights * 8, strict=True):
        assert_bit_identical(got, compute(x, weight), "from another thread")


def test_a_changed_weight_is_seen(half: Halves) -> None:
    x, weight = half.randn(9, 40), half.randn(30, 40)
    first = compute(x, weight)
    weight.neg_()
    assert_bit_identical(compute(x, weight), -first, "changed in place")
    weight.data.copy_(-weight)
    assert_bit_identical(compute(x, weight), first, "changed behind its counter")


def test_one_weight_in_two_forms(half: Halves) -> None:
    """What float32 and halves ask for are different things."""
    x, weight = (torch.randint(-8, 9, (rows, 40)).to(half.dtype) for rows in (9, 30))
    for _ in range(2):
        narrow = compute(x, weight)
        wide = kernels().openmp_linear(x.float(), weight, None, None, None, None, 0, 0.0, 0.0)
        assert_bit_identical(narrow, wide.to(half.dtype), "rounded once")


def test_wider_weights_are_rounded_as_autocast_does(half: Halves) -> None:
    x, weight, bias = half.randn(9, 41), torch.randn(30, 41), torch.randn(30)
    got = compute(x, weight, bias)
    assert_bit_identical(got, compute(x, weight.to(half.dtype), bias.to(half.dtype)), "float32")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(65, 130), nn.Linear(65, 130, bias=False)
        self.down = nn.Linear(130, 65)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * nn.functional.silu(self.gate(x)))


def test_models(half: Halves) -> None:
    """The whole way: numbers, who computed, what was absorbed, what packed weights cost."""
    torch.manual_seed(1)
    model, x = Gated().eval().to(half.dtype), half.randn(4, 21, 65)
    compiled = compile_in("O2 openmp", model)
    with torch.no_grad(), no_cached_graphs():
        for call in range(3):
            exact = in_double(model, x)
            assert_contract(compiled(x), model(x), exact, f"call {call}")
    assert_regions(compiled, ("linear", "openmp", 3, 9))
    assert details(compiled, "linear") == ["with mul, silu, add, shared_input"]
    (graph,) = graph_reports(compiled)
    (linear,) = (row for row in graph.as_dict()["regions"] if row["region"] == "linear")
    assert (linear["recipes"], linear["packed_bytes"]) == (["prepack"], 3 * 65 * 130 * 2)
