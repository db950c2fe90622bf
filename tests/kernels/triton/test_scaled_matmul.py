"""Products of 8-bit numbers and their quantisation, against float64.

In Triton's interpreter 8-bit floats are multiplied exactly, but by way of float16: that the matrix
units get them as they are is proved by the assembly, in tests/cross_compile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.numerics import assert_contract
from tests.support.triton_kernels import check
from triton_kernels import architectures, launching, quantise_rows, scaled_matmul
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
TILED, VECTOR, COMBINE = (f"matmul_{kind}_kernel" for kind in ("tiled", "vector", "combine"))
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
HALF = torch.float16


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    if dtype is INT8:
        return torch.randint(-127, 128, shape, dtype=INT8)
    return torch.randn(shape).to(dtype)


def own(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
    wide = torch.float64 if scale_a.dtype is torch.float64 else torch.float32
    out = (a.to(wide) @ b.to(wide)) * scale_a.reshape(-1, 1) * scale_b + bias
    return out if wide is torch.float64 else out.half()


def kernel(*given: Tensor) -> Tensor:
    *given, bias = given
    return scaled_matmul(*given, bias=bias, out_dtype=HALF)


@pytest.mark.parametrize(("rows", "kernels"), [(3, [VECTOR]), (7, [TILED]), (70, [TILED])])
@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
def test_row_and_column_scales(dtype: torch.dtype, rows: int, kernels: list[str]) -> None:
    a, b = numbers(rows, 50, dtype=dtype), numbers(24, 50, dtype=dtype).mT
    scales = torch.rand(rows) / 50, torch.rand(24) / 50
    check(f"{dtype}", kernel, own, (a, b, *scales, torch.randn(24)), launches=kernels)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_tensor(shape: tuple[int, ...]) -> None:
    a, b = numbers(6, 32, dtype=INT8), numbers(32, 20, dtype=INT8)
    scales = torch.full(shape, 0.02), torch.full(shape, 0.03)
    check("tensor", kernel, own, (a, b, *scales, torch.randn(20)), launches=[TILED])


def test_different_kinds_of_8_bit_floats() -> None:
    a, b = numbers(6, 32, dtype=E4M3), numbers(32, 20, dtype=E5M2)
    check("both", kernel, own, (a, b, torch.rand(6, 1), torch.rand(1, 20), torch.randn(20)))


@pytest.mark.parametrize(("rows", "kernels"), [(2, [VECTOR, COMBINE]), (9, [TILED, COMBINE])])
def test_a_divided_depth(rows: int, kernels: list[str]) -> None:
    a, b = numbers(rows, 600, dtype=INT8), numbers(600, 20, dtype=INT8)
    scales = torch.rand(rows) / 2000, torch.rand(20)
    check("divided", kernel, own, (a, b, *scales, torch.randn(20)), launches=kernels)


def test_whole_numbers_are_added_exactly() -> None:
    a = torch.full((8, 2048), 127, dtype=INT8)
    a[:, -1] = 1  # 127 * 127 * 2047 + 127 has more digits than float32
    b = torch.full((2048, 16), 127, dtype=INT8)
    exact = torch.tensor(127.0 * 127 * 2047 + 127)
    got = scaled_matmul(a, b, torch.ones(1), torch.ones(1), out_dtype=torch.float32)
    assert bool((got == exact).all())


@pytest.mark.parametrize("layout", ["strided", "sliced", "expanded"])
def test_layouts(layout: str) -> None:
    a, b = numbers(20, 80, dtype=INT8), numbers(80, 60, dtype=INT8)
    scales = torch.rand(20) / 50, torch.rand(40) / 50
    a, b, left, right = {
        "strided": (a[::2, ::2], b[::2, ::3], scales[0][::2], scales[1][::2]),
        "sliced": (a[3:13, 1:41], b[40:, 7:27], scales[0][3:13], scales[1][5:25]),
        "expanded": (a[:1, :40].expand(10, 40), b[:40, :1].expand(40, 20), *(torch.rand(1),) * 2),
    }[layout]
    check(layout, kernel, own, (a, b, left, right, torch.randn(20)), launches=[TILED])


def test_batches_and_empty_tensors() -> None:
    b, one = numbers(8, 16, dtype=INT8), torch.ones(())
    assert scaled_matmul(numbers(2, 3, 8, dtype=INT8), b, one, one).shape == (2, 3, 16)
    assert scaled_matmul(numbers(0, 8, dtype=INT8), b, one, one).shape == (0, 16)
    nothing = scaled_matmul(numbers(3, 0, dtype=INT8), b[:0], one, one, out_dtype=HALF)
    assert torch.equal(nothing, torch.zeros(3, 16, dtype=HALF))


def test_nan_stands_where_a_scale_is_nan() -> None:
    """As that of a quantised row with NaN is. The interpreter knows no NaN of 8 bits."""
    a, b = numbers(6, 32, dtype=INT8), numbers(32, 20, dtype=INT8)
    scales = torch.rand(6), torch.rand(20)
    scales[0][2], scales[1][3] = torch.nan, torch.inf
    check("nan", kernel, own, (a, b, *scales, torch.randn(20)))


def test_an_architecture_without_the_dtype_computes_in_plain_torch() -> None:
    a, b = numbers(6, 32, dtype=E4M3), numbers(32, 20, dtype=E4M3)
    one, bias = torch.ones(1), torch.zeros(20)
    with architectures.assume(architectures.named("sm80")), launching.watched() as names:
        got = scaled_matmul(a, b, one, one, out_dtype=HALF)
    assert not names
    torch.testing.assert_close(got, own(a, b, one, one, bias))


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize("shape", [(3, 100), (2, 3, 7), (2, 40000), (1, 1)])
def test_quantise_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    x[..., -1] *= 3  # the largest is often in the last part
    with launching.watched() as names:
        values, scale = quantise_rows(x, dtype)
    assert names == ["quantise_rows_kernel"]
    largest = 127.0 if dtype is INT8 else torch.finfo(dtype).max
    assert_contract(scale, scale, x.double().abs().amax(-1) / largest, "scale")
    exact = x.double() / scale.double().unsqueeze(-1)
    step = 0.5 if dtype is INT8 else torch.finfo(dtype).eps / 2 * exact.abs()
    tiny = 0.0 if dtype is INT8 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    right = (values.double() - exact).abs() <= 1.001 * step + tiny
    assert bool((right | carried(exact, dtype)).all())


def carried(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where rounding to 8 bits ends in a power of two: Triton's interpreter loses the carry."""
    if dtype is INT8:
        return torch.zeros_like(exact, dtype=torch.bool)
    mantissa, _ = torch.frexp(exact.to(dtype).double())
    return mantissa.abs() == 0.5


def test_rows_are_quantised_whatever_their_layout() -> None:
    x = torch.randn(6, 10, 12)
    views = [x.transpose(0, 2), x[..., ::2], x[:, 2:7, 1:], x[0, :, 3:10], x[0, :1].expand(7, 12)]
    for laid in views:
        values, scale = quantise_rows(laid, INT8)
        error = (values * scale.unsqueeze(-1) - laid).abs()
        assert bool((error <= 0.5001 * scale.unsqueeze(-1)).all())


@pytest.mark.parametrize("columns", [16, 20000])
def test_a_row_with_nan_is_quantised_with_a_scale_of_nan(columns: int) -> None:
    x = torch.randn(3, columns)
    x[1, 3], x[2, columns - 1] = torch.nan, torch.nan
    assert quantise_rows(x)[1].isnan().tolist() == [False, True, True]


def test_empty_rows_and_rows_of_zeros() -> None:
    assert quantise_rows(torch.randn(0, 5))[1].shape == (0,)
    assert quantise_rows(torch.randn(2, 0))[0].shape == (2, 0)
    values, scale = quantise_rows(torch.zeros(2, 5), INT8)
    assert bool((values == 0).all()) and bool((scale > 0).all())


@pytest.mark.plain
def test_the_plain_meaning_of_quantisation() -> None:
    x = torch.randn(3, 100, dtype=torch.float64)
    values, scale = quantise_rows(x, E4M3)
    torch.testing.assert_close(values.double() * scale.unsqueeze(1), x, rtol=0.07, atol=0.01)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    a, b, one = numbers(2, 4, dtype=INT8), numbers(4, 3, dtype=INT8), torch.ones(1)
    wrong: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        ("both 8-bit floats or both int8", (a, b.to(E4M3), one, one), {}),
        ("b is a matrix with a row for each column", (a, b.mT, one, one), {}),
        ("scale_a has one float, or one for each of the 2", (a, b, torch.ones(3), one), {}),
        ("scale_b has one float, or one for each of the 3", (a, b, one, torch.ones(2)), {}),
        ("bias has one float for each of 3", (a, b, one, one), {"bias": torch.ones(2)}),
        ("out_dtype is one of", (a, b, one, one), {"out_dtype": INT8}),
    ]
    for message, given, more in wrong:
        with pytest.raises(KernelArgumentError, match=message):
            scaled_matmul(*given, **more)
    with pytest.raises(KernelArgumentError, match="dtype is one of"):
        quantise_rows(torch.randn(2, 4), torch.float16)
    with pytest.raises(KernelArgumentError, match="x is a tensor of floats"):
        quantise_rows(a)


def test_a_layer_is_traced_whole_whatever_its_sizes() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        (values, scale), (columns, scales) = quantise_rows(x, INT8), quantise_rows(weight, INT8)
        return scaled_matmul(values, columns.mT, scale, scales, out_dtype=torch.float32)

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (6, 9):
        x, weight = torch.randn(rows, 20), torch.randn(10, 20)
        torch.testing.assert_close(traced(x, weight), layer(x, weight))


def test_the_operators_keep_the_rules_of_torch() -> None:
    a, b = numbers(6, 16, dtype=INT8), numbers(16, 5, dtype=INT8)
    given = (a, b, torch.rand(6), torch.rand(5), torch.rand(5), torch.float32)
    torch.library.opcheck(torch.ops.triton_kernels.scaled_matmul.default, given)
    torch.library.opcheck(torch.ops.triton_kernels.quantise_rows.default, (torch.rand(3, 8), INT8))
