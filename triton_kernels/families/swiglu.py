"""Gated activations: silu(gate) * up and gelu(gate) * up, of two tensors or of one that packs both.

Computed in float32 and rounded once. The backward computes the activation again and gives both
gradients in one pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import swiglu as configurations
from triton_kernels.device import activated, activation_slope
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike, as_rows

# --- kernels --------------------------------------------------------------------------------------


@jit
def _gated_forward_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, n_rows, n_columns,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, is_in = _tile(n_rows, n_columns, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + column, is_in, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, is_in, 0.0).to(tl.float32)
    out = activated(gate, ACTIVATION) * up
    tl.store(out_ptr + row * n_columns + column, out.to(out_ptr.dtype.element_ty), is_in)


@jit
def _gated_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr,
    grad_stride, gate_stride, up_stride, grad_gate_stride, grad_up_stride, n_rows, n_columns,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, is_in = _tile(n_rows, n_columns, ROWS, BLOCK)
    grad = tl.load(grad_ptr + row * grad_stride + column, is_in, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, is_in, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, is_in, 0.0).to(tl.float32)
    grad_gate = grad * up * activation_slope(gate, ACTIVATION)
    grad_up = grad * activated(gate, ACTIVATION)
    at = grad_gate_ptr + row * grad_gate_stride + column
    tl.store(at, grad_gate.to(grad_gate_ptr.dtype.element_ty), is_in)
    at = grad_up_ptr + row * grad_up_stride + column
    tl.store(at, grad_up.to(grad_up_ptr.dtype.element_ty), is_in)


@jit
def _tile(n_rows, n_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, columns, mask) of this program: tiles are counted along the columns first."""
    tile, across = tl.program_id(0), tl.cast(tl.cdiv(n_columns, BLOCK), tl.int32)
    row = ((tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    return row, column, (row < n_rows) & (column < n_columns)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = alike(gate)
    _forward_into(as_rows(gate), as_rows(up), as_rows(out), activation)
    return out


def _launch_packed_forward(x: Tensor, activation: str) -> Tensor:
    out = _fake_packed_forward(x, activation)
    gate, up = _halves(as_rows(x))
    _forward_into(gate, up, as_rows(out), activation)
    return out


def _launch_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = alike(gate), alike(up)
    given = [as_rows(one) for one in (grad, gate, up, grad_gate, grad_up)]
    _backward_into(*given, activation=activation)
    return grad_gate, grad_up


def _launch_packed_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    grad_x = alike(x)
    gradients = _halves(as_rows(grad_x))
    _backward_into(as_rows(grad), *_halves(as_rows(x)), *gradients, activation=activation)
    return grad_x


def _forward_into(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    gate, up, out = _in_one_row_if_dense(gate, up, out)
    config = _config("gated_forward", out)
    launch(
        _gated_forward_kernel,
        _grid(out, config),
        config,
        gate_ptr=gate,
        up_ptr=up,
        out_ptr=out,
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        n_rows=out.shape[0],
        n_columns=out.shape[1],
        ACTIVATION=activation,
    )


def _backward_into(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, *, activation: str
) -> None:
    grad, gate, up, grad_gate, grad_up = _in_one_row_if_dense(grad, gate, up, grad_gate, grad_up)
    config = _config("gated_backward", grad)
    launch(
        _gated_backward_kernel,
        _grid(grad, config),
        config,
        grad_ptr=grad,
        gate_ptr=gate,
        up_ptr=up,
        grad_gate_ptr=grad_gate,
        grad_up_ptr=grad_up,
        grad_stride=grad.stride(0),
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        grad_gate_stride=grad_gate.stride(0),
        grad_up_stride=grad_up.stride(0),
        n_rows=grad.shape[0],
        n_columns=grad.shape[1],
        ACTIVATION=activation,
    )


def _in_one_row_if_dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Without gaps between the rows, tiles need not end where a row does."""
    if all(one.is_contiguous() for one in tensors):
        return tuple(one.view(1, -1) for one in tensors)
    return tensors


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]


def _config(kernel: str, rows: Tensor) -> Config:
    architecture = architectures.of(rows.device)
    candidates = configurations.tiles(architecture, *rows.shape)
    return tuning.choose(kernel, architecture, (*rows.shape, rows.dtype), candidates)


def _grid(rows: Tensor, config: Config) -> tuple[int]:
    return (cdiv(rows.shape[0], config["ROWS"]) * cdiv(rows.shape[1], config["BLOCK"]),)


# --- meaning --------------------------------------------------------------------------------------


def gated_meaning(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """In plain torch: activation(gate) * up."""
    return (_activated(_widened(gate), activation) * _widened(up)).to(gate.dtype)


def packed_meaning(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gated_meaning(gate, up, activation)


def backward_meaning(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    wide, narrow = _widened(grad), gate.dtype
    grad_gate = wide * _widened(up) * _slope(_widened(gate), activation)
    return grad_gate.to(narrow), (wide * _activated(_widened(gate), activation)).to(narrow)


def packed_backward_meaning(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.cat(backward_meaning(grad, gate, up, activation), -1)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        below = (1 + torch.erf(x * math.sqrt(0.5))) / 2
        return below + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if activation == "gelu_tanh":
        inner = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        part = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        return part + x * part * (1 - part) * inner
    part = torch.sigmoid(x)
    return part * (1 + x * (1 - part))


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return alike(gate)


def _fake_packed_forward(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return alike(gate), alike(up)


def _fake_packed_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    return alike(x)


_forward = operator(
    "gated_forward", launcher=_launch_forward, meaning=gated_meaning, fake=_fake_forward
)
_backward = operator(
    "gated_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)
_packed_forward = operator(
    "gated_packed_forward",
    launcher=_launch_packed_forward,
    meaning=packed_meaning,
    fake=_fake_packed_forward,
)
_packed_backward = operator(
    "gated_packed_backward",
    launcher=_launch_packed_backward,
    meaning=packed_backward_meaning,
    fake=_fake_packed_backward,
)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    return *_backward(grad, *ctx.saved_tensors, ctx.activation), None


def _differentiate_packed(ctx, grad):
    return _packed_backward(grad, *ctx.saved_tensors, ctx.activation), None


differentiable("gated_forward", backward=_differentiate, saves=_save)
differentiable("gated_packed_forward", backward=_differentiate_packed, saves=_save)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up; `approximate` is "none" or "tanh", as torch.nn.functional.gelu has it."""
    return _gated(gate, up, _gelu(approximate))


def swiglu_packed(x: Tensor) -> Tensor:
    """swiglu(gate, up) of one tensor whose last dimension holds [gate, up]."""
    return _gated_packed(x, "silu")


def geglu_packed(x: Tensor, approximate: str = "none") -> Tensor:
    """geglu(gate, up) of one tensor whose last dimension holds [gate, up]."""
    return _gated_packed(x, _gelu(approximate))


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    demand(
        gate.dim() > 0 and gate.is_floating_point(),
        f"gate is a tensor of floats with rows, not {described(gate)}",
    )
    same = gate.shape == up.shape and gate.dtype == up.dtype
    demand(same, f"up is as gate is ({described(gate)}), not {described(up)}")
    compute = _forward if kernels_take(gate, up) else gated_meaning
    return compute(gate, up, activation)


def _gated_packed(x: Tensor, activation: str) -> Tensor:
    demand(
        x.dim() > 0 and x.is_floating_point() and x.shape[-1] % 2 == 0,
        f"x is a tensor of floats whose last dimension holds [gate, up], not {described(x)}",
    )
    compute = _packed_forward if kernels_take(x) else packed_meaning
    return compute(x, activation)


def _gelu(approximate: str) -> str:
    known = {"none": "gelu", "tanh": "gelu_tanh"}
    demand(approximate in known, f"approximate is 'none' or 'tanh', not {approximate!r}")
    return known[approximate]
