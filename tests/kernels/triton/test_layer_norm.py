"""layer_norm and add_layer_norm, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import add_layer_norm, launching, layer_norm
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
SHAPES = [(1, 2), (3, 5), (2, 3, 64), (7, 129), (2, 1000)]
FORWARD, BACKWARD = "layer_norm_forward_kernel", "layer_norm_backward_kernel"
IN_PARTS = [f"layer_norm_wide_{part}_kernel" for part in ("forward", "backward")]
IN_PARTS.append("layer_norm_weight_backward_kernel")


def torchs_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def torchs_add_norm(x: Tensor, residual: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    return torchs_norm(x + residual, *parameters), x + residual


def operands(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = torch.randn(2, shape[-1], dtype=dtype)
    x = torch.randn(shape, dtype=dtype) + 1.0
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = (*operands(*shape, dtype=dtype), 1e-5)
    check(f"{shape}", layer_norm, torchs_norm, inputs, launches=[FORWARD, BACKWARD])


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
@pytest.mark.parametrize("columns", [48, 33000])
def test_parameters_that_are_left_out(given: str, columns: int) -> None:
    x, weight, bias = operands(3, columns)
    parameters = {"neither": (None, None), "weight": (weight, None), "bias": (None, bias)}[given]
    check(given, layer_norm, torchs_norm, (x, *parameters, 1e-5))


@pytest.mark.parametrize("shape", [(6, 100), (2, 2, 257)])
def test_with_a_residual(shape: tuple[int, ...]) -> None:
    x, weight, bias = operands(*shape, dtype=torch.float16)
    residual = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    check("residual", add_layer_norm, torchs_add_norm, (x, residual, weight, bias, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_registers_do_not_hold(dtype: torch.dtype) -> None:
    x, weight, bias = operands(2, 33000, dtype=dtype)
    residual = torch.randn(2, 33000, dtype=dtype, requires_grad=True)
    inputs = (x, residual, weight, bias, 1e-6)
    check("wide", add_layer_norm, torchs_add_norm, inputs, launches=IN_PARTS)


# Of many rows the worst is compared: in a single one torch's mean may be exact by luck.
@pytest.mark.parametrize(("rows", "columns"), [(60, 100), (2, 33000)])
def test_a_mean_far_from_zero_leaves_the_variance_exact(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns) + 3000.0
    drift = torch.linspace(0.0, 50.0, columns)  # the parts of a wide row have means of their own
    inputs = ((x + drift).requires_grad_(), *operands(1, columns)[1:], 1e-5)
    check("far", layer_norm, torchs_norm, inputs)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "sliced"])
def test_layouts(layout: str) -> None:
    base = torch.randn(6, 10, 12)
    x = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:1].expand(6, 10, 12),
        "strided": base[..., ::2],
        "sliced": base[:, 2:7, 1:],
    }[layout].requires_grad_()
    weight, bias = torch.randn(2, 2 * x.shape[-1])[:, ::2]
    parameters = (weight.requires_grad_(), bias.requires_grad_())
    check(layout, layer_norm, torchs_norm, (x, *parameters, 1e-6))


@pytest.mark.parametrize("columns", [20, 33000])
def test_incoming_gradients_of_any_layout(columns: int) -> None:
    x, weight, bias = operands(3, columns)
    residual = torch.randn(3, columns)

    def summed(norm: Callable[..., Any]) -> Callable[..., Tensor]:
        def compute(*inputs: Any) -> Tensor:
            normed, beside = norm(*inputs)
            return normed.sum(0) + beside.t().sum(1)  # expanded, and transposed twice

        return compute

    inputs = (x, residual, weight, bias, 1e-6)
    check("gradients", summed(add_layer_norm), summed(torchs_add_norm), inputs)


def test_only_the_sum_is_used() -> None:
    x, weight, bias = operands(3, 20)
    residual = torch.randn(3, 20, requires_grad=True)
    summed = add_layer_norm(x, residual, weight, bias)[1]
    grads = torch.autograd.grad(summed.sum(), (x, residual, weight), allow_unused=True)
    assert torch.equal(grads[0], torch.ones_like(x)) and torch.equal(grads[0], grads[1])
    assert grads[2] is None


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)])
def test_empty(shape: tuple[int, ...]) -> None:
    x, weight, bias = operands(*shape)
    out = layer_norm(x, weight, bias)
    grads = torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))
    assert out.shape == x.shape
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("columns", [40, 33000])
def test_nan_and_infinities_stand_where_torch_has_them(columns: int) -> None:
    x = torch.randn(5, columns)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] = 2.0  # no deviation at all
    inputs = (x.requires_grad_(), *torch.randn(2, columns), 1e-6)
    check("special", layer_norm, torchs_norm, inputs)


def test_large_numbers_do_not_overflow() -> None:
    x = torch.full((3, 64), 60000.0, dtype=torch.float16)
    x[:, ::2] = -60000.0
    parameters = (torch.ones(64, dtype=torch.float16), None)
    check("large", layer_norm, torchs_norm, (x.requires_grad_(), *parameters, 1e-6))


def test_float32_parameters_of_a_half_precision_norm() -> None:
    x = torch.randn(4, 50, dtype=torch.float16, requires_grad=True)
    inputs = (x, *operands(1, 50)[1:], 1e-5)

    def in_float32(x: Tensor, *parameters: Any) -> Tensor:  # torch on CUDA takes no mixed dtypes
        wide = x if x.dtype is torch.float64 else x.float()
        return torchs_norm(wide, *parameters).to(x.dtype)

    check("mixed", layer_norm, in_float32, inputs, launches=[FORWARD, BACKWARD])


def test_the_gradient_of_rows_of_one_number_is_zero() -> None:
    inputs = operands(5, 1)
    normed = layer_norm(*inputs, 1e-5)
    (gradient,) = torch.autograd.grad(normed, inputs[0], torch.randn(5, 1))
    assert not gradient.any()


def test_bfloat16_numbers_that_are_exact() -> None:
    x = torch.randn(4, 96).bfloat16()
    weight, bias = torch.randn(2, 96).bfloat16()
    check("bfloat16", layer_norm, torchs_norm, (x, weight, bias, 1e-6))


def test_rows_farther_apart_than_32_bits_count() -> None:
    memory = torch.empty(3 * 2**30 + 8, dtype=torch.float16)  # only what is written takes space
    x = memory.as_strided((4, 8), (2**30, 1))
    x.copy_(torch.randn(4, 8))
    inputs = (x.requires_grad_(), *operands(1, 8, dtype=torch.float16)[1:], 1e-5)
    check("far apart", layer_norm, torchs_norm, inputs, launches=[FORWARD, BACKWARD])


def test_gradients_are_the_same_in_every_run() -> None:
    inputs = operands(50, 64)
    runs = [torch.autograd.grad(layer_norm(*inputs).sum(), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    with pytest.raises(KernelArgumentError, match=r"weight has one number for each of 4 columns"):
        layer_norm(torch.randn(2, 4), torch.randn(5))
    with pytest.raises(KernelArgumentError, match=r"bias has one number for each of 4 columns"):
        layer_norm(torch.randn(2, 4), None, torch.randn(1, 4))
    with pytest.raises(KernelArgumentError, match=r"residual is as x is"):
        add_layer_norm(torch.randn(2, 4), torch.randn(2, 5))
    with pytest.raises(KernelArgumentError, match=r"x is a tensor of floats"):
        layer_norm(torch.ones(2, 4, dtype=torch.int32))


@pytest.mark.plain
def test_float64_is_computed_in_plain_torch() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 7, dtype=torch.float64)
    inputs = (x, weight.requires_grad_(), bias.requires_grad_())
    with launching.watched() as names:
        assert torch.autograd.gradcheck(layer_norm, inputs)
    assert not names
    assert torch.allclose(layer_norm(*inputs), torchs_norm(*inputs, 1e-5), rtol=1e-12)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    x, weight, bias = operands(3, 20)
    operator = torch.ops.triton_kernels.layer_norm_forward.default
    torch.library.opcheck(operator, (x, None, weight, bias, 1e-6))
