"""x @ weight.T with a weight of int8 and a scale for each of its rows: a layer in half the memory.

The whole numbers are multiplied as they are, widened in registers; the scale comes after the sum.
On the way back to x it comes before, since the depth of that product is what has the scales.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triton_kernels.errors import demand, described
from triton_kernels.families.matmul import multiply
from triton_kernels.families.scaled_matmul import quantise_rows
from triton_kernels.registration import differentiable, kernels_take, operator

# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, depth), weight (columns, depth)"""
    out = _fake_forward(x, weight, scale, bias)
    batched = (x.unsqueeze(0), weight.mT.unsqueeze(0), out.unsqueeze(0))
    multiply(*batched, column_scale=scale, bias=bias)
    return out


def _launch_backward(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x."""
    out = _fake_backward(grad, weight, scale)
    batched = (grad.unsqueeze(0), weight.unsqueeze(0), out.unsqueeze(0))
    multiply(*batched, depth_scale=scale)
    return out


# --- meaning --------------------------------------------------------------------------------------


def forward_meaning(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """In plain torch. Widened first: sums of whole numbers do not fit into float16."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = (x.to(wide) @ weight.to(wide).mT) * scale.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


def backward_meaning(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """In plain torch: the gradient of x."""
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    return ((grad.to(wide) * scale.to(wide)) @ weight.to(wide)).to(grad.dtype)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_backward(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]))


_forward = operator(
    "int8_weight_matmul", launcher=_launch_forward, meaning=forward_meaning, fake=_fake_forward
)
_backward = operator(
    "int8_weight_matmul_backward",
    launcher=_launch_backward,
    meaning=backward_meaning,
    fake=_fake_backward,
)


def _save(ctx, inputs, output) -> None:
    _, weight, scale, bias = inputs
    ctx.save_for_backward(weight, scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx, grad):
    weight, scale = ctx.saved_tensors
    wants_x, _, _, wants_bias = ctx.needs_input_grad
    return (
        _backward(grad, weight, scale) if wants_x else None,
        None,
        None,
        grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None,
    )


differentiable("int8_weight_matmul", backward=_differentiate, saves=_save)


def int8_weight_matmul(
    x: Tensor, weight_int8: Tensor, scale: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """x @ (weight_int8 * scale[:, None]).T + bias, with a scale for each row of the weight.

    Differentiable in x and bias; weight and scale are data.
    """
    fits = weight_int8.dim() == 2 and weight_int8.dtype is torch.int8
    demand(fits, f"weight_int8 is a matrix of int8, not {described(weight_int8)}")
    columns, depth = weight_int8.shape
    fits = x.dim() > 0 and x.is_floating_point() and x.shape[-1] == depth
    demand(fits, f"x has floats in rows of {depth}, as the weight has, not {described(x)}")
    fits = scale.shape == (columns,) and scale.is_floating_point()
    demand(
        fits,
        f"scale has one float for each of {columns} rows of the weight, not {described(scale)}",
    )
    demand(not scale.requires_grad, "scale is data: no gradient flows into it")
    if bias is not None:
        fits = bias.shape == (columns,) and bias.is_floating_point()
        demand(fits, f"bias has one float for each of {columns} columns, not {described(bias)}")
    flat = x.reshape(math.prod(x.shape[:-1]), depth)
    takes = kernels_take(flat, scale, bias) and weight_int8.device == x.device
    out = (_forward if takes else forward_meaning)(flat, weight_int8, scale, bias)
    return out.view(*x.shape[:-1], columns)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, the scale of each row) of a matrix (columns, depth), for `int8_weight_matmul`."""
    fits = weight.dim() == 2 and weight.is_floating_point()
    demand(fits, f"weight is a matrix of floats, not {described(weight)}")
    return quantise_rows(weight, torch.int8)
