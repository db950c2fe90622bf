"""rms_norm and its kin, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.numerics import assert_contract
from tests.support.triton_kernels import DTYPES, check
from triton_kernels import add_rms_norm, launching, rms_norm, rms_norm_quantised
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
SHAPES = [(1, 2), (3, 5), (2, 3, 64), (7, 129), (2, 1000)]
WIDE = (2, 33000)  # read in parts


def torchs_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def torchs_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple:
    return torchs_norm(x + residual, weight, eps), x + residual


def operands(*shape: int, dtype: torch.dtype, weight: bool = True) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape[-1], dtype=dtype, requires_grad=True) if weight else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kernels = ["rms_norm_forward_kernel", "rms_norm_backward_kernel"]
    inputs = (*operands(*shape, dtype=dtype), 1e-5)
    check(f"{shape}", rms_norm, torchs_norm, inputs, launches=kernels)


def test_without_a_weight_and_with_the_default_eps() -> None:
    x, _ = operands(5, 48, dtype=torch.float32, weight=False)
    check("no weight", rms_norm, lambda x: functional.rms_norm(x, (48,)), (x,))


@pytest.mark.parametrize("shape", [(6, 100), (2, 2, 257)])
def test_with_a_residual(shape: tuple[int, ...]) -> None:
    x, weight = operands(*shape, dtype=torch.float16)
    residual = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    check("residual", add_rms_norm, torchs_add_norm, (x, residual, weight, 1e-6))


def test_rows_that_registers_do_not_hold() -> None:
    x, weight = operands(*WIDE, dtype=torch.float32)
    residual = torch.randn(WIDE, requires_grad=True)
    kernels = [f"rms_norm_{part}_kernel" for part in ("wide_forward", "wide_backward")]
    kernels.append("rms_norm_weight_backward_kernel")
    inputs = (x, residual, weight, 1e-6)
    check("wide", add_rms_norm, torchs_add_norm, inputs, launches=kernels)


@pytest.mark.parametrize(
    "layout", ["transposed", "expanded", "strided", "sliced", "rows apart", "one row"]
)
def test_layouts(layout: str) -> None:
    base = torch.randn(6, 10, 12)
    x = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:1].expand(6, 10, 12),
        "strided": base[..., ::2],
        "sliced": base[:, 2:7, 1:],
        "rows apart": base[0, :, :7],
        "one row": base[0, :1].expand(6, 12),
    }[layout].requires_grad_()
    weight = torch.randn(2 * x.shape[-1], requires_grad=True)
    check(layout, rms_norm, torchs_norm, (x, weight.detach()[::2].requires_grad_(), 1e-6))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1], requires_grad=True)
    out = rms_norm(x, weight, 1e-6)
    grads = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert out.shape == x.shape
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_nan_and_infinities_stand_where_torch_has_them() -> None:
    x = torch.randn(5, 40)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] = 0.0
    check("special", rms_norm, torchs_norm, (x.requires_grad_(), torch.randn(40), 1e-6))


def test_large_numbers_do_not_overflow() -> None:
    x = torch.full((3, 64), 60000.0, dtype=torch.float16).requires_grad_()
    check("large", rms_norm, torchs_norm, (x, torch.ones(64, dtype=torch.float16), 1e-6))


def test_bfloat16_numbers_that_are_exact() -> None:
    x = torch.randn(4, 96).bfloat16()
    check("bfloat16", rms_norm, torchs_norm, (x, torch.randn(96).bfloat16(), 1e-6))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("columns", [100, 33000])
def test_quantised(dtype: torch.dtype, columns: int) -> None:
    x, residual = torch.randn(3, columns), torch.randn(3, columns)
    weight = torch.randn(columns)
    with launching.watched() as names:
        values, scale, summed = rms_norm_quantised(x, weight, 1e-6, residual=residual, dtype=dtype)
    assert len(names) == 1
    assert summed is not None and torch.equal(summed, x + residual)
    true = torchs_norm((x + residual).double(), weight.double(), 1e-6)
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    assert_contract(scale, scale, true.abs().amax(-1) / largest, "scale")
    step = 0.5 if dtype is torch.int8 else torch.finfo(dtype).eps / 2 * largest
    error = (values.double() * scale.double()[:, None] - true).abs()
    right = error <= 1.01 * step * scale[:, None]
    assert bool((right | carried(true / scale[:, None], dtype)).all())


def carried(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where rounding to 8 bits ends in a power of two: Triton's interpreter loses the carry there
    (3.7), a GPU does not."""
    if dtype is torch.int8:
        return torch.zeros_like(exact, dtype=torch.bool)
    mantissa, _ = torch.frexp(exact.to(dtype).double())
    return mantissa.abs() == 0.5


def test_a_row_with_nan_is_quantised_with_a_scale_of_nan() -> None:
    x = torch.randn(2, 16)
    x[1, 3] = torch.nan
    _, scale, _ = rms_norm_quantised(x, dtype=torch.int8)
    assert scale.isnan().tolist() == [False, True]


def test_gradients_are_the_same_in_every_run() -> None:
    x, weight = operands(50, 64, dtype=torch.float32)
    runs = [torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    with pytest.raises(KernelArgumentError, match=r"weight has one number for each of 4 columns"):
        rms_norm(torch.randn(2, 4), torch.randn(5))
    with pytest.raises(KernelArgumentError, match=r"residual is as x is"):
        add_rms_norm(torch.randn(2, 4), torch.randn(2, 5))
    with pytest.raises(KernelArgumentError, match="dtype is one of"):
        rms_norm_quantised(torch.randn(2, 4), dtype=torch.int32)


@pytest.mark.plain
def test_float64_is_computed_in_plain_torch() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    with launching.watched() as names:
        assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-6), (x,))
    assert not names


def test_the_operator_keeps_the_rules_of_torch() -> None:
    x, weight = operands(3, 20, dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.triton_kernels.rms_norm_forward.default, (x, None, weight, 1e-6)
    )
