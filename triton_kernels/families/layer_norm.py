"""Layer norm: (x - mean) / sqrt(variance + eps) * weight + bias, with a residual added before.

The variance is the mean square of what is left after the mean is taken away, never a difference of
two large sums. Statistics are float32 and rounding happens once. The gradients of weight and bias
are summed in a fixed order: each program sums some rows, torch sums what the programs found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import layer_norm as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike, as_rows

# --- kernels --------------------------------------------------------------------------------------


@jit
def _layer_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, n_rows, n_columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are read once and stay in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_is_in, column_is_in = row < n_rows, column < n_columns
    is_in = row_is_in[:, None] & column_is_in[None, :]
    place = row[:, None] * n_columns + column[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], is_in, 0.0).to(tl.float32)
    if residual_ptr is not None:
        at = row[:, None] * residual_stride + column[None, :]
        x += tl.load(residual_ptr + at, is_in, 0.0).to(tl.float32)
        # What goes on beside the norm is rounded, and so is what is normed: as torch has it.
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        tl.store(sum_ptr + place, x.to(sum_ptr.dtype.element_ty), is_in)
    mean = tl.sum(x, 1) / n_columns
    centred = tl.where(is_in, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / n_columns + eps)
    tl.store(mean_ptr + row, mean, row_is_in)
    tl.store(rstd_ptr + row, rstd, row_is_in)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _layer_norm_wide_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, n_columns, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row for each program, read twice: for rows that registers do not hold."""
    row = tl.program_id(0).to(tl.int64)
    seen, mean, squares = 0.0, 0.0, 0.0
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + row * residual_stride + column, is_in, 0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
            tl.store(sum_ptr + row * n_columns + column, x.to(sum_ptr.dtype.element_ty), is_in)
        here = tl.cast(tl.minimum(n_columns - start, BLOCK), tl.float32)
        mean_here = tl.sum(x, 0) / here
        centred = tl.where(is_in, x - mean_here, 0.0)
        # The two parts' squares about one mean: nothing large is taken from anything large.
        step = mean_here - mean
        squares += tl.sum(centred * centred, 0) + step * (seen / (seen + here)) * step * here
        mean += step * (here / (seen + here))
        seen += here
    rstd = tl.rsqrt(squares / n_columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        if residual_ptr is not None:  # added again: what was just stored may not be visible yet
            x += tl.load(residual_ptr + row * residual_stride + column, is_in, 0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, is_in, 0.0).to(tl.float32)
        tl.store(out_ptr + row * n_columns + column, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _layer_norm_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,
    grad_x_ptr, weight_partial_ptr, bias_partial_ptr,
    grad_stride, grad_sum_stride, x_stride, n_rows, n_columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every nth tile of rows, and sums their part of the two gradients that
    have one number for each column."""
    column = tl.arange(0, BLOCK)
    column_is_in = column < n_columns
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    weight_partial = tl.zeros([BLOCK], tl.float32)
    bias_partial = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_is_in = row < n_rows
        is_in = row_is_in[:, None] & column_is_in[None, :]
        at = grad_ptr + row[:, None] * grad_stride + column[None, :]
        grad = tl.load(at, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], is_in, 0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, row_is_in, 0.0)
        rstd = tl.load(rstd_ptr + row, row_is_in, 0.0)
        normed = tl.where(is_in, (x - mean[:, None]) * rstd[:, None], 0.0)
        if weight_partial_ptr is not None:
            weight_partial += tl.sum(grad * normed, 0)
        if bias_partial_ptr is not None:
            bias_partial += tl.sum(grad, 0)
        weighted = grad * weight
        along = tl.sum(weighted * normed, 1) / n_columns
        level = tl.sum(weighted, 1) / n_columns
        # A row of one number is normed to zero whatever it is. Compilers fuse `weighted` into the
        # difference, and what a fused product does not round away would be its gradient.
        slope = tl.where(n_columns > 1, rstd, 0.0)
        grad_x = slope[:, None] * (weighted - level[:, None] - normed * along[:, None])
        if grad_sum_ptr is not None:
            at = grad_sum_ptr + row[:, None] * grad_sum_stride + column[None, :]
            grad_x += tl.load(at, is_in, 0.0).to(tl.float32)
        at = grad_x_ptr + row[:, None] * n_columns + column[None, :]
        tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), is_in)
    at = tl.program_id(0).to(tl.int64) * n_columns + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + at, weight_partial, column_is_in)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + at, bias_partial, column_is_in)


@jit
def _layer_norm_wide_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr,
    grad_stride, grad_sum_stride, x_stride, n_columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row for each program, read twice; weight and bias have a kernel of their own."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    products, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        weighted = tl.load(grad_ptr + row * grad_stride + column, is_in, 0.0).to(tl.float32)
        if weight_ptr is not None:
            weighted *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        products += tl.where(is_in, weighted * ((x - mean) * rstd), 0.0)
        sums += weighted
    along = tl.sum(products, 0) / n_columns
    level = tl.sum(sums, 0) / n_columns
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        weighted = tl.load(grad_ptr + row * grad_stride + column, is_in, 0.0).to(tl.float32)
        if weight_ptr is not None:
            weighted *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        grad_x = rstd * (weighted - level - (x - mean) * rstd * along)
        if grad_sum_ptr is not None:
            at = grad_sum_ptr + row * grad_sum_stride + column
            grad_x += tl.load(at, is_in, 0.0).to(tl.float32)
        at = grad_x_ptr + row * n_columns + column
        tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), is_in)


@jit
def _layer_norm_weight_backward_kernel(
    grad_ptr, x_ptr, mean_ptr, rstd_ptr, weight_partial_ptr, bias_partial_ptr,
    grad_stride, x_stride, n_rows, n_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Axis 0 divides the columns, axis 1 the rows: every nth tile of them, as above."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column_is_in = column < n_columns
    weight_partial = tl.zeros([BLOCK], tl.float32)
    bias_partial = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(n_rows, ROWS), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_is_in = row < n_rows
        is_in = row_is_in[:, None] & column_is_in[None, :]
        at = grad_ptr + row[:, None] * grad_stride + column[None, :]
        grad = tl.load(at, is_in, 0.0).to(tl.float32)
        if weight_partial_ptr is not None:
            at = x_ptr + row[:, None] * x_stride + column[None, :]
            x = tl.load(at, is_in, 0.0).to(tl.float32)
            mean = tl.load(mean_ptr + row, row_is_in, 0.0)
            rstd = tl.load(rstd_ptr + row, row_is_in, 0.0)
            weight_partial += tl.sum(grad * ((x - mean[:, None]) * rstd[:, None]), 0)
        bias_partial += tl.sum(grad, 0)
    at = tl.program_id(1).to(tl.int64) * n_columns + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + at, weight_partial, column_is_in)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + at, bias_partial, column_is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed, x + residual or nothing, the mean and 1 / deviation of each row)"""
    rows, beside = as_rows(x), None if residual is None else as_rows(residual)
    out, summed, mean, rstd = _fake_forward(x, residual, weight, bias, eps)
    config = _config("layer_norm_forward", rows, configurations.forward)
    arguments = {
        "x_ptr": rows,
        "residual_ptr": beside,
        "weight_ptr": _packed(weight),
        "bias_ptr": _packed(bias),
        "out_ptr": out,
        "sum_ptr": None if beside is None else summed,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "x_stride": rows.stride(0),
        "residual_stride": 0 if beside is None else beside.stride(0),
        "n_columns": rows.shape[1],
        "eps": eps,
    }
    n_rows = rows.shape[0]
    if _is_wide(config, rows):
        launch(_layer_norm_wide_forward_kernel, (n_rows,), _parts_of(config), **arguments)
    else:
        grid = (cdiv(n_rows, config["ROWS"]),)
        launch(_layer_norm_forward_kernel, grid, config, **arguments, n_rows=n_rows)
    return out, summed, mean, rstd


def _launch_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of the weight, of the bias; nothing for what is not there); `x` is what was
    normed"""
    grads, rows = as_rows(grad), as_rows(x)
    beside = None if grad_sum is None else as_rows(grad_sum)
    grad_x = alike(x)
    n_rows, n_columns = rows.shape
    config = _config("layer_norm_backward", rows, configurations.backward)
    tiles = cdiv(n_rows, config["ROWS"])
    programs = configurations.programs(architectures.of(x.device), tiles)
    weight_partial = _partial(weight, programs)
    bias_partial = _partial(bias, programs)
    known = {
        "grad_ptr": grads,
        "x_ptr": rows,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "grad_stride": grads.stride(0),
        "x_stride": rows.stride(0),
        "n_columns": n_columns,
    }
    more = {
        "grad_sum_ptr": beside,
        "grad_sum_stride": 0 if beside is None else beside.stride(0),
        "weight_ptr": _packed(weight),
        "grad_x_ptr": grad_x,
    }
    partials = {
        "weight_partial_ptr": weight_partial,
        "bias_partial_ptr": bias_partial,
        "n_rows": n_rows,
    }
    if not _is_wide(config, rows):
        launch(_layer_norm_backward_kernel, (programs,), config, **known, **more, **partials)
    else:
        launch(_layer_norm_wide_backward_kernel, (n_rows,), _parts_of(config), **known, **more)
        if weight is not None or bias is not None:
            tile = configurations.WEIGHT_BACKWARD
            grid = (cdiv(n_columns, tile["BLOCK"]), programs)
            launch(_layer_norm_weight_backward_kernel, grid, tile, **known, **partials)
    return (
        grad_x,
        _summed(weight_partial, weight, x, n_rows),
        _summed(bias_partial, bias, x, n_rows),
    )


def _partial(parameter: Tensor | None, programs: int) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.new_empty((programs, *parameter.shape), dtype=torch.float32)


def _summed(partial: Tensor | None, parameter: Tensor | None, x: Tensor, n_rows: int) -> Tensor:
    if partial is None or parameter is None:
        return _nothing(x)
    return (partial.sum(0) if n_rows else torch.zeros_like(partial[0])).to(parameter.dtype)


def _packed(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _config(kernel: str, rows: Tensor, candidates_of: Any) -> Config:
    architecture = architectures.of(rows.device)
    candidates = candidates_of(architecture, rows.shape[1])
    return tuning.choose(kernel, architecture, (rows.shape[1], rows.dtype), candidates)


def _is_wide(config: Config, rows: Tensor) -> bool:
    return config["BLOCK"] < rows.shape[1]


def _parts_of(config: Config) -> Config:
    return Config({"BLOCK": config["BLOCK"]}, config.warps, config.stages)


# --- meaning --------------------------------------------------------------------------------------


def layer_norm_meaning(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In plain torch: (normed, x + residual or nothing, mean and 1 / deviation of each row)."""
    summed = x if residual is None else x + residual
    wide = _widened(summed)
    mean = wide.mean(-1)
    centred = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    normed = centred * rstd.unsqueeze(-1)
    if weight is not None:
        normed = normed * _widened(weight)
    if bias is not None:
        normed = normed + _widened(bias)
    beside = x.new_empty(0) if residual is None else summed
    return normed.to(x.dtype), beside, mean, rstd


def backward_meaning(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, inverse = _widened(grad), rstd.unsqueeze(-1)
    normed = (_widened(x) - mean.unsqueeze(-1)) * inverse
    weighted = wide if weight is None else wide * _widened(weight)
    level, along = weighted.mean(-1, True), (weighted * normed).mean(-1, True)
    grad_x = inverse * (weighted - level - normed * along)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    return grad_x.to(x.dtype), _of_columns(wide * normed, weight, x), _of_columns(wide, bias, x)


def _of_columns(products: Tensor, parameter: Tensor | None, x: Tensor) -> Tensor:
    if parameter is None:
        return _nothing(x)
    return products.reshape(-1, products.shape[-1]).sum(0).to(parameter.dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return alike(x), x.new_empty(0) if residual is None else alike(x), mean, rstd


def _fake_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight, of_bias = (_nothing(x) if p is None else alike(p) for p in (weight, bias))
    return alike(x), of_weight, of_bias


_forward = operator(
    "layer_norm_forward", launcher=_launch_forward, meaning=layer_norm_meaning, fake=_fake_forward
)
_backward = operator(
    "layer_norm_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    x, residual, weight, bias, _ = inputs
    _, summed, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(summed if ctx.has_residual else x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_sum, *_):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None, None
    beside = grad_sum if ctx.has_residual else None
    grad_x, grad_weight, grad_bias = _backward(grad, beside, x, weight, bias, mean, rstd)
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        None if weight is None else grad_weight,
        None if bias is None else grad_bias,
        None,
    )


differentiable("layer_norm_forward", backward=_differentiate, saves=_save)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, as
    torch.nn.LayerNorm has it."""
    _demand_fits(x, None, weight, bias)
    return _call(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual): what a block does between two layers, in one
    pass."""
    _demand_fits(x, residual, weight, bias)
    normed, summed, *_ = _call(x, residual, weight, bias, eps)
    return normed, summed


def _call(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    compute = _forward if kernels_take(x, residual, weight, bias) else layer_norm_meaning
    return compute(x, residual, weight, bias, eps)


def _demand_fits(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    demand(
        x.dim() > 0 and x.is_floating_point(),
        f"x is a tensor of floats with rows, not {described(x)}",
    )
    if residual is not None:
        same = residual.shape == x.shape and residual.dtype == x.dtype
        demand(same, f"residual is as x is ({described(x)}), not {described(residual)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            fits = given.shape == x.shape[-1:]
            columns = f"{name} has one number for each of {x.shape[-1]} columns"
            demand(fits, f"{columns}, not {described(given)}")
