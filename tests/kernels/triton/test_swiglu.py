"""Gated activations, packed and not, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import geglu, geglu_packed, launching, swiglu, swiglu_packed
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import swiglu as family

Tensor = torch.Tensor
Gated = Callable[[Tensor, Tensor], Tensor]
KERNELS = ["gated_forward_kernel", "gated_backward_kernel"]
SHAPES = [(1,), (3, 5), (2, 3, 64), (1, 2500), (7, 129)]


def torchs_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def torchs_geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return functional.gelu(gate, approximate=approximate) * up


def packed(gated: Gated) -> Callable[[Tensor], Tensor]:
    return lambda x: gated(*x.chunk(2, -1))


PAIRS = {
    "swiglu": (swiglu, torchs_swiglu),
    "geglu": (geglu, torchs_geglu),
    "geglu tanh": (
        lambda gate, up: geglu(gate, up, "tanh"),
        lambda gate, up: torchs_geglu(gate, up, "tanh"),
    ),
}


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    gate, up = torch.randn(2, *shape, dtype=dtype)
    return (2 * gate).requires_grad_(), up.detach().clone().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(f"{shape}", swiglu, torchs_swiglu, pair(*shape, dtype=dtype), launches=KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRS)
def test_each_activation(name: str, dtype: torch.dtype) -> None:
    check(name, *PAIRS[name], pair(4, 40, dtype=dtype), launches=KERNELS)


@pytest.mark.parametrize("shape", [(2,), (3, 10), (2, 3, 258), (5, 4, 2)])
def test_packed(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    check(f"{shape}", swiglu_packed, packed(torchs_swiglu), (x,), launches=KERNELS)
    check(f"{shape}", geglu_packed, packed(torchs_geglu), (x,), launches=KERNELS)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "sliced"])
def test_layouts(layout: str) -> None:
    base = torch.randn(6, 10, 12)
    gate = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:1].expand(6, 10, 12),
        "strided": base[..., ::2],
        "sliced": base[:, 2:7, 1:],
    }[layout].requires_grad_()
    up = torch.randn(gate.shape, requires_grad=True)
    check(layout, swiglu, torchs_swiglu, (gate, up), launches=KERNELS)
    check(layout, swiglu, torchs_swiglu, (up, gate), launches=KERNELS)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_layouts_of_a_packed_tensor(layout: str) -> None:
    base = torch.randn(4, 6, 12)
    x = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:, :1].expand(4, 6, 12),
        "sliced": base[:, 1:5, 2:],
    }[layout].requires_grad_()
    check(layout, swiglu_packed, packed(torchs_swiglu), (x,), launches=KERNELS)


def test_two_halves_of_one_tensor() -> None:
    x = torch.randn(3, 5, 26, requires_grad=True)
    halves = packed(swiglu)
    check("halves", halves, packed(torchs_swiglu), (x,), launches=KERNELS)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_incoming_gradients_of_any_layout(layout: str) -> None:
    gate, up = pair(6, 9)
    grad = {"expanded": torch.randn(6, 1).expand(6, 9), "transposed": torch.randn(9, 6).mT}[layout]
    got = torch.autograd.grad(swiglu(gate, up), (gate, up), grad)
    right = torch.autograd.grad(torchs_swiglu(gate, up), (gate, up), grad)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5)])
def test_empty(shape: tuple[int, ...]) -> None:
    gate, up = pair(*shape)
    out = swiglu(gate, up)
    grads = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    assert out.shape == shape == grads[0].shape == grads[1].shape
    x = torch.randn(0, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu_packed(x).sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("name", PAIRS)
def test_nan_and_infinities_stand_where_torch_has_them(name: str) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 200.0, -200.0, 1e30])
    gate, up = torch.meshgrid(special, special, indexing="ij")
    check(name, *PAIRS[name], (gate.requires_grad_(), up.requires_grad_()))


def test_large_numbers_do_not_overflow_on_the_way() -> None:
    gate = torch.tensor([60000.0, 300.0, -9.0], dtype=torch.float16).requires_grad_()
    up = torch.tensor([1.0, 200.0, 900.0], dtype=torch.float16).requires_grad_()
    check("large", *PAIRS["geglu tanh"], (gate, up))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    with pytest.raises(KernelArgumentError, match=r"up is as gate is \(float32\[2, 4\]\)"):
        swiglu(torch.randn(2, 4), torch.randn(2, 5))
    with pytest.raises(KernelArgumentError, match="gate is a tensor of floats"):
        swiglu(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match=r"holds \[gate, up\], not float32\[2, 5\]"):
        swiglu_packed(torch.randn(2, 5))
    with pytest.raises(KernelArgumentError, match="approximate is 'none' or 'tanh', not 'erf'"):
        geglu_packed(torch.randn(2, 4), "erf")


@pytest.mark.plain
@pytest.mark.parametrize("name", PAIRS)
def test_float64_is_computed_in_plain_torch(name: str) -> None:
    gate, up = pair(2, 3, dtype=torch.float64)
    with launching.watched() as names:
        assert torch.autograd.gradcheck(PAIRS[name][0], (gate, up))
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_backward_written_in_plain_torch(activation: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 4, dtype=torch.float64)
    (right,) = torch.autograd.grad(family.packed_meaning(x, activation), x, grad)
    got = family.packed_backward_meaning(grad, x.detach(), activation)
    torch.testing.assert_close(got, right)


def test_the_operators_keep_the_rules_of_torch() -> None:
    gate, up = pair(3, 20)
    torch.library.opcheck(torch.ops.triton_kernels.gated_forward.default, (gate, up, "silu"))
    torch.library.opcheck(torch.ops.triton_kernels.gated_packed_forward.default, (gate, "gelu"))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_slope_of_gelu_to_the_last_digits(approximate: str) -> None:
    """Near 1 the sigmoid's distance from 1 is what counts, which a difference does not have."""
    gate = torch.linspace(-6, 6, 5000).requires_grad_()
    (slope,) = torch.autograd.grad(geglu(gate, torch.ones(5000), approximate).sum(), gate)
    exact = gate.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(functional.gelu(exact, approximate=approximate).sum(), exact)
    assert (slope - true).abs().max() < 3e-7
