"""openmp_int8_linear, called directly: linear layers whose weight is bytes.

act((x @ weight.T) * row_scale * scale + bias + before) * times + after
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from lowering.native import library
from lowering.native.shapes import INT8_RESULTS
from tests.kernels.test_linear_kernel import ACTIVATIONS
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

Tensor = torch.Tensor
SIZES = [*itertools.product((1, 3, 5, 9, 40), (1, 7, 64, 130), (1, 16, 37, 100))]
# Over several parts of k, blocks of rows and strips of panels.
LARGE = [(1, 3073, 48), (4, 2050, 70), (8, 1000, 33), (97, 3072, 65), (330, 700, 200)]


class Around(NamedTuple):
    row_scale: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None
    before: Tensor | None = None
    times: Tensor | None = None
    after: Tensor | None = None


ALONE = Around()


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def rows_of(dtype: torch.dtype, m: int, k: int) -> Tensor:
    return some_bytes(m, k) if dtype is torch.int8 else torch.randn(m, k).to(dtype)


def around(m: int, n: int, dtype: torch.dtype, of_bytes: bool) -> Around:
    beside = [torch.randn(m, n).to(dtype) for _ in range(3)]
    scale, bias = torch.rand(n) * 0.01, torch.randn(n).to(dtype)
    return Around(torch.rand(m, 1) * 0.01 if of_bytes else None, scale, bias, *beside)


def compute(
    x: Tensor,
    weight: Tensor,
    around: Around,
    result: torch.dtype = torch.float32,
    activation: str = "none",
    in_out: bool = False,
) -> Tensor:
    _, a, b = ACTIVATIONS[activation]
    act = list(ACTIVATIONS).index(activation)
    stored = weight.t().contiguous() if in_out else weight
    kind = INT8_RESULTS.index(result)
    return kernels().openmp_int8_linear(x, stored, *around, act, a, b, kind, in_out)


def expected(x: Tensor, weight: Tensor, around: Around, activation: str, wide: bool) -> Tensor:
    """In the rows' own precision, as a model would have it step by step; or in float64."""
    dtype = torch.float64 if wide else torch.float32 if x.dtype is torch.int8 else x.dtype
    if x.dtype is torch.int8:
        value = (x.double() @ weight.double().t()).to(dtype)  # exact, as sums of integers are
    else:
        value = x.to(dtype) @ weight.to(dtype).t()
    to = lambda t: t.to(dtype)  # noqa: E731
    given = around
    for factor in (given.row_scale, given.scale):
        value = value if factor is None else value * to(factor)
    for addend in (given.bias, given.before):
        value = value if addend is None else value + to(addend)
    value = ACTIVATIONS[activation][0](value)
    value = value if given.times is None else value * to(given.times)
    return value if given.after is None else value + to(given.after)


def check(
    x: Tensor,
    weight: Tensor,
    around: Around = ALONE,
    result: torch.dtype = torch.float32,
    activation: str = "none",
    in_out: bool = False,
) -> None:
    got = compute(x, weight, around, result, activation, in_out)
    assert got.is_contiguous() and got.dtype is result
    own = expected(x, weight, around, activation, wide=False).to(result)
    assert_contract(got, own, expected(x, weight, around, activation, wide=True), activation)


def multiplied(dtype: torch.dtype) -> None:
    kernels()
    if dtype in (torch.bfloat16, torch.float16) and not library.multiplies(dtype):
        pytest.skip(f"{dtype} is not multiplied as it is here, so this operator does not get it")


@pytest.mark.parametrize("result", INT8_RESULTS, ids=str)
def test_bytes_that_give_halves(result: torch.dtype) -> None:
    """With a bias that is wider than they are, which is not rounded before it is added."""
    for m, k, n in ((2, 70, 40), (40, 300, 70)):
        given = around(m, n, result, of_bytes=True)._replace(bias=torch.randn(n) * 3)
        x, weight = some_bytes(m, k), some_bytes(n, k)
        check(x, weight, given, result, "silu")
        cancelled = -(x[:1].double() @ weight.double().t() * 1e-2)[0].float()
        alone = Around(torch.full((m, 1), 0.1), torch.full((n,), 0.1), cancelled)
        check(x, weight, alone, result)


ROWS = pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float32, torch.bfloat16, torch.float16], ids=str
)


def result_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.int8 else dtype


@ROWS
def test_sizes(dtype: torch.dtype) -> None:
    multiplied(dtype)
    for m, k, n in SIZES + LARGE:
        x, weight, result = rows_of(dtype, m, k), some_bytes(n, k), result_of(dtype)
        given = around(m, n, result, dtype is torch.int8)
        check(x, weight, Around(given.row_scale, given.scale), result)
        check(x, weight, given, result, in_out=m % 2 == 0)


@ROWS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(dtype: torch.dtype, activation: str) -> None:
    multiplied(dtype)
    for m in (2, 33):
        x, weight, result = rows_of(dtype, m, 70), some_bytes(40, 70), result_of(dtype)
        check(x, weight, around(m, 40, result, dtype is torch.int8), result, activation)


@pytest.mark.parametrize("result", INT8_RESULTS, ids=str)
def test_sums_of_bytes_are_exact(result: torch.dtype) -> None:
    """With the largest numbers there are, and with one scale only."""
    for m, k, n in ((1, 66, 17), (3, 1030, 64), (50, 515, 33)):
        for fill in (-128, 127):
            x, weight = torch.full((m, k), fill, dtype=torch.int8), some_bytes(n, k)
            weight[0] = -128
            exact = x.double() @ weight.double().t()
            got = compute(x, weight, Around(scale=torch.full((n,), 2.0**-14)), result)
            assert_bit_identical(got, (exact * 2.0**-14).float().to(result), f"{m} {k} {n}")
            got = compute(x, weight, Around(row_scale=torch.full((m, 1), 2.0**-14)), result)
            assert_bit_identical(got, (exact * 2.0**-14).float().to(result), f"{m} {k} {n}")


@ROWS
def test_results_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    multiplied(dtype)
    for m in (1, 6, 64):
        x, weight, result = rows_of(dtype, m, 600), some_bytes(300, 600), result_of(dtype)
        before = torch.get_num_threads()
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(compute(x, weight, ALONE, result))
        finally:
            torch.set_num_threads(before)
        for one in results[1:]:
            assert_bit_identical(one, results[0], f"{m} rows")


@ROWS
def test_not_a_number_and_infinity(dtype: torch.dtype) -> None:
    """They stay in the row that they are in, and in its factor."""
    multiplied(dtype)
    weight, result = some_bytes(20, 33), result_of(dtype)
    weight[:, 3] = 1
    for m in (2, 40):
        x = rows_of(dtype, m, 33)
        if dtype is not torch.int8:
            x[1, 3] = torch.inf
        scale = torch.ones(m, 1) if dtype is torch.int8 else None
        if scale is not None:
            scale[1] = torch.nan
        got = compute(x, weight, Around(scale), result)
        assert not got[1].isfinite().any() and got[0].isfinite().all() and got[2:].isfinite().all()


@ROWS
def test_no_rows_no_outputs_no_inputs(dtype: torch.dtype) -> None:
    multiplied(dtype)
    for m, k, n in ((0, 5, 3), (3, 5, 0), (3, 0, 5)):
        x, weight = rows_of(dtype, m, k), some_bytes(n, k)
        got = compute(x, weight, ALONE, result_of(dtype))
        assert got.shape == (m, n) and not got.count_nonzero()


def test_rows_and_weights_with_gaps() -> None:
    for dtype in (torch.int8, torch.float32):
        x, weight = rows_of(dtype, 8, 60)[::2, :30], some_bytes(40, 70)[::2, 5:35]
        check(x, weight, Around(scale=torch.rand(40)[::2]))


def test_a_weight_that_changed_is_packed_again() -> None:
    x, weight = torch.randn(3, 64), some_bytes(32, 64)
    first = compute(x, weight, ALONE)
    packed = library.packed_count()
    assert_bit_identical(compute(x, weight, ALONE), first, "again")
    assert library.packed_count() == packed
    weight[5] = 0
    assert not compute(x, weight, ALONE)[:, 5].any()
    assert library.packed_count() == packed + 1


def test_calls_of_several_threads() -> None:
    x, weight = some_bytes(20, 256), some_bytes(64, 256)
    wanted = compute(x, weight, ALONE)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: compute(x, weight, ALONE), range(40)):
            assert_bit_identical(got, wanted, "a thread")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": some_bytes(3, 9)}, "a weight of bytes of"),
        ({"weight": torch.randn(4, 8)}, "a weight of bytes of"),
        ({"around": Around(row_scale=torch.rand(2))}, "factors of 3 rows"),
        ({"around": Around(scale=torch.rand(5))}, "numbers for 4 outputs"),
        ({"around": Around(after=torch.rand(4))}, "beside 3 rows of 4 outputs"),
        ({"x": torch.randn(3, 8), "result": torch.bfloat16}, "give such rows"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    kernels()
    good: dict[str, Any] = {"x": some_bytes(3, 8), "weight": some_bytes(4, 8), "around": Around()}
    with pytest.raises(RuntimeError, match=message):
        compute(**good | given)
