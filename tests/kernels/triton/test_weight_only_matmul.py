"""Products with a weight of int8, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import int8_weight_matmul, launching, quantise_weight
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
TILED, VECTOR, COMBINE = (f"matmul_{kind}_kernel" for kind in ("tiled", "vector", "combine"))


def operands(
    rows: int, depth: int, columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    weight = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
    scale = (torch.rand(columns) + 0.5) / 127
    x = torch.randn(rows, depth, dtype=dtype, requires_grad=True)
    return x, weight, scale, torch.randn(columns, dtype=dtype, requires_grad=True)


def kernel(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return int8_weight_matmul(x, weight, scale, bias=bias)


def own(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    dequantised = (weight.to(scale.dtype) * scale.unsqueeze(1)).to(x.dtype)
    return x @ dequantised.mT + bias


# (rows, depth, columns): which kernels run forward, and for the gradient of x
SHAPES = {
    (1, 300, 40): [VECTOR, VECTOR],
    (4, 519, 17): [VECTOR, COMBINE, VECTOR],
    (3, 10, 519): [VECTOR, VECTOR, COMBINE],
    (16, 70, 33): [TILED, TILED],
    (9, 20, 519): [TILED, TILED, COMBINE],
    (70, 50, 90): [TILED, TILED],
    (1, 1, 1): [VECTOR, VECTOR],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weight_matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(f"{shape}", kernel, own, operands(*shape, dtype=dtype), launches=SHAPES[shape])


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_layouts(layout: str, rows: int) -> None:
    x, weight, scale, bias = operands(2 * rows, 60, 48)
    x = x.detach()
    x, weight, scale, bias = {
        "transposed": (x[:rows].mT.contiguous().mT, weight.mT.contiguous().mT, scale, bias),
        "expanded": (x[:1].expand(rows, 60), weight[:, :1].expand(48, 60), scale, bias),
        "strided": (x[::2, ::2], weight[::3, ::2], scale[::3], bias.detach()[::3]),
    }[layout]
    check(layout, kernel, own, (x.detach().requires_grad_(), weight, scale, bias))


def test_more_dimensions_and_no_bias() -> None:
    x, weight, scale, _ = operands(6, 20, 10)
    x = x.detach().view(2, 3, 20).requires_grad_()
    check(
        "3-D",
        int8_weight_matmul,
        lambda x, weight, scale: own(x, weight, scale, scale.new_zeros(10)),
        (x, weight, scale),
    )


def test_sums_of_whole_numbers_do_not_overflow_half_precision() -> None:
    x = torch.full((6, 64), 100.0, dtype=torch.float16)
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    got = int8_weight_matmul(x, weight, torch.full((16,), 1 / 127))
    assert bool((got == 6400).all())


def test_nan_and_infinities_stand_where_torch_has_them() -> None:
    for rows in (3, 7):
        x, weight, scale, bias = operands(rows, 30, 20)
        with torch.no_grad():
            x[0, 3], x[1, 4], x[2, 29] = torch.nan, torch.inf, -torch.inf
        scale[5] = torch.nan
        check("special", kernel, own, (x, weight, scale, bias))


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    x, weight, scale, bias = operands(*shape)
    out = kernel(x, weight, scale, bias)
    torch.testing.assert_close(out, own(x, weight, scale, bias))
    grads = torch.autograd.grad(out, (x, bias), torch.ones_like(out))
    assert torch.equal(grads[0], torch.zeros_like(x))
    assert torch.equal(grads[1], torch.full_like(bias, shape[0]))


def test_a_quantised_weight_is_near_the_weight() -> None:
    weight = torch.randn(20, 100)
    with launching.watched() as names:
        values, scale = quantise_weight(weight)
    assert names == ["quantise_rows_kernel"]
    assert bool(((values * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all())
    torch.testing.assert_close(scale, weight.abs().amax(1) / 127)
    x = torch.randn(5, 100)
    torch.testing.assert_close(
        int8_weight_matmul(x, values, scale), x @ weight.mT, atol=0.3, rtol=0.05
    )


@pytest.mark.plain
def test_float64_is_computed_in_plain_torch() -> None:
    x, weight, scale, bias = operands(3, 6, 4, dtype=torch.float64)
    with launching.watched() as names:
        assert torch.autograd.gradcheck(
            lambda x, bias: kernel(x, weight, scale.double(), bias), (x, bias)
        )
    assert not names


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    x, weight, scale, _ = operands(2, 4, 3)
    with pytest.raises(KernelArgumentError, match="weight_int8 is a matrix of int8"):
        int8_weight_matmul(x, weight.float(), scale)
    with pytest.raises(KernelArgumentError, match="x has floats in rows of 4"):
        int8_weight_matmul(x[:, :3], weight, scale)
    with pytest.raises(KernelArgumentError, match="scale has one float for each of 3 rows"):
        int8_weight_matmul(x, weight, scale[:2])
    with pytest.raises(KernelArgumentError, match="scale is data"):
        int8_weight_matmul(x, weight, scale.requires_grad_())
    with pytest.raises(KernelArgumentError, match="bias has one float for each of 3"):
        int8_weight_matmul(x, weight, scale.detach(), bias=torch.randn(2))
    with pytest.raises(KernelArgumentError, match="weight is a matrix of floats"):
        quantise_weight(weight)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    op = torch.ops.triton_kernels.int8_weight_matmul.default
    torch.library.opcheck(op, operands(6, 16, 5))
