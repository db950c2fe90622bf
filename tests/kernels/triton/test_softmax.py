"""softmax and log_softmax along any dimension, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import launching, log_softmax, softmax
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
SHAPES = [(1, 1), (3, 5), (2, 3, 64), (7, 129), (2, 1000)]
WHOLE = ["softmax_forward_kernel", "softmax_backward_kernel"]
IN_PARTS = ["softmax_wide_forward_kernel", "softmax_wide_backward_kernel"]
OURS = {"softmax": softmax, "log_softmax": log_softmax}
TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
both = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape, dtype=dtype)).requires_grad_()


def check_softmax(name: str, x: Tensor, dim: int = -1, launches: Any = None) -> None:
    check(name, OURS[name], TORCHS[name], (x, dim), launches=launches)


def torchs_own(name: str, scale: float) -> Callable[..., Tensor]:
    def compute(x: Tensor, mask: Tensor) -> Tensor:
        scores = x * scale
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
        return TORCHS[name](scores, -1)

    return compute


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_along_the_last_dimension(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_softmax(name, numbers(*shape, dtype=dtype), launches=WHOLE)


@both
@pytest.mark.parametrize("shape", [(5, 7), (3, 40, 6), (2, 3, 4, 20), (1, 9, 1, 5)])
def test_along_every_dimension(name: str, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape) - 1):
        check_softmax(name, numbers(*shape), dim, launches=WHOLE)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_registers_do_not_hold(name: str, dtype: torch.dtype) -> None:
    check_softmax(name, numbers(2, 33000, dtype=dtype), launches=IN_PARTS)


@both
def test_columns_that_registers_do_not_hold(name: str) -> None:
    check_softmax(name, numbers(2, 2100, 18), 1, launches=IN_PARTS)


@both
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 4])
def test_dimensions_that_no_three_strides_describe(name: str, dim: int) -> None:
    x = torch.randn(2, 4, 3, 2, 6).transpose(0, 3).transpose(1, 4)[:, ::2].requires_grad_()
    check_softmax(name, x, dim, launches=WHOLE)


@both
@pytest.mark.parametrize("layout", ["transposed", "expanded", "constant", "strided", "sliced"])
def test_layouts(name: str, layout: str) -> None:
    base = torch.randn(6, 10, 12)
    x = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:1].expand(6, 10, 12),
        "constant": base[..., :1].expand(6, 10, 12),
        "strided": base[..., ::2],
        "sliced": base[:, 2:7, 1:],
    }[layout].requires_grad_()
    for dim in (1, -1):
        check_softmax(name, x, dim, launches=WHOLE)


@both
@pytest.mark.parametrize("columns", [12, 17000])
def test_incoming_gradients_of_any_layout(name: str, columns: int) -> None:
    def spread(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: compute(x, -1).transpose(0, 1).sum(1)

    x = numbers(3, 2, columns)
    check("gradients", spread(OURS[name]), spread(TORCHS[name]), (x,))


@both
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (3, 1, 5), (4, 1), (5,)])
def test_a_mask_that_spreads(name: str, kind: str, shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape)
    if kind == "bool":
        mask = (mask > 0) | (torch.arange(shape[-1]) == 0)
    x = numbers(2, 3, 4, 5)

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        return OURS[name](x, scale=0.3, mask=mask)

    check("mask", ours, torchs_own(name, 0.3), (x, mask), launches=WHOLE)


@both
def test_a_mask_over_rows_in_parts(name: str) -> None:
    mask = torch.rand(33000) > 0.5
    mask[:9000] = False  # a whole part of which nothing counts
    x = numbers(2, 33000)

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        return OURS[name](x, scale=-2.0, mask=mask)

    check("mask", ours, torchs_own(name, -2.0), (x, mask), launches=IN_PARTS)


@both
def test_a_row_of_which_nothing_counts(name: str) -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    mask[1] = False

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        return OURS[name](x, mask=mask)

    check("nothing", ours, torchs_own(name, 1.0), (numbers(3, 9), mask), launches=WHOLE)


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_a_scale_that_turns_the_order_around(scale: float) -> None:
    check(
        "scale",
        lambda x: softmax(x, scale=scale),
        lambda x: (x * scale).softmax(-1),
        (numbers(3, 21),),
    )


def test_a_mask_that_learns() -> None:
    x, mask = numbers(2, 3, 8), numbers(3, 1)
    check(
        "mask",
        lambda x, m: softmax(x, mask=m),
        lambda x, m: (x + m).softmax(-1),
        (x, mask),
        launches=[],
    )


@both
def test_another_dtype_for_the_result(name: str) -> None:
    x = numbers(3, 20, dtype=torch.float16)

    def wide(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, dtype: compute(x, -1, dtype=dtype)

    inputs = (x, torch.float32)
    check("wider", wide(OURS[name]), wide(TORCHS[name]), inputs, launches=WHOLE)


@both
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    x = numbers(*shape)
    for dim in range(len(shape)):
        out = OURS[name](x, dim)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert out.shape == x.shape == grad.shape


@both
@pytest.mark.parametrize("columns", [40, 33000])
def test_nan_and_infinities_stand_where_torch_has_them(name: str, columns: int) -> None:
    x = torch.randn(6, columns)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] = -torch.inf
    x[4, :-1] = -torch.inf
    check_softmax(name, x.requires_grad_())


@both
def test_large_numbers_do_not_overflow(name: str) -> None:
    x = torch.tensor([[3e4, -3e4, 2e4], [-6e4, -6e4, -6e4]], dtype=torch.float16)
    check_softmax(name, x.requires_grad_())


def test_bfloat16_numbers_that_are_exact() -> None:
    x = torch.tensor([[0.0, 0.0], [64.0, -64.0]]).bfloat16()
    check_softmax("softmax", x)


@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_farther_apart_than_32_bits_count(dim: int) -> None:
    memory = torch.empty(3 * 2**30 + 8, dtype=torch.float16)  # only what is written takes space
    x = memory.as_strided((4, 8), (2**30, 1))
    x.copy_(torch.randn(4, 8))
    check_softmax("softmax", x.requires_grad_(), dim, launches=WHOLE)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(KernelArgumentError, match=r"dim is one of 2 dimensions, -2 to 1, not 2"):
        softmax(x, 2)
    with pytest.raises(KernelArgumentError, match=r"mask is bool or floats .* not float32\[3, 1\]"):
        softmax(x, mask=torch.ones(3, 1))
    with pytest.raises(KernelArgumentError, match=r"mask is bool or floats .* not int64\[2, 4\]"):
        log_softmax(x, mask=torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match="x is a tensor of floats"):
        softmax(torch.ones(3, dtype=torch.int32))


@both
@pytest.mark.plain
def test_float64_is_computed_in_plain_torch(name: str) -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(7) > 0.2
    with launching.watched() as names:
        assert torch.autograd.gradcheck(lambda x: OURS[name](x, 0, scale=0.5), (x,))
        OURS[name](x, mask=mask)
    assert not names


@both
@pytest.mark.plain
def test_the_meaning_of_the_backward(name: str) -> None:
    from triton_kernels.families.softmax import backward_meaning

    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 7, dtype=torch.float64)
    y = TORCHS[name](x * 0.5, 0)
    (true,) = torch.autograd.grad(y, x, grad)
    got = backward_meaning(grad, y.detach(), None, 0, 0.5, torch.float64, name == "log_softmax")
    assert torch.allclose(got, true)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    operator = torch.ops.triton_kernels.softmax_forward.default
    mask = torch.rand(20) > 0.2
    torch.library.opcheck(operator, (numbers(3, 20), mask, -1, 0.5, torch.float32, False))
