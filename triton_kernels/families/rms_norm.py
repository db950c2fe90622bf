"""RMS norm: x / sqrt(mean(x^2) + eps) * weight, with a residual added before, or quantised after.

Statistics are computed in float32 and rounding happens once, at the end. The gradient of the weight
is summed in a fixed order: each program sums some rows, torch sums what the programs found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import rms_norm as configurations
from triton_kernels.device import rounded
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike, as_rows

# --- kernels --------------------------------------------------------------------------------------


@jit
def _rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, scale_ptr, rstd_ptr,
    x_stride, residual_stride, n_rows, n_columns, eps,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are read once and stay in registers. LARGEST > 0: each is scaled to that, for 8 bits."""
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
    rstd = tl.rsqrt(tl.sum(x * x, 1) / n_columns + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, row_is_in)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    if LARGEST > 0:
        nan = tl.max((y != y).to(tl.int32), 1) > 0  # tl.max leaves NaN out, torch.amax does not
        scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-10) / LARGEST
        scale = tl.where(nan, float("nan"), scale)
        tl.store(scale_ptr + row, scale, row_is_in)
        y = y / scale[:, None]
        if out_ptr.dtype.element_ty == tl.int8:
            y = rounded(y)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _rms_norm_wide_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rstd_ptr,
    x_stride, residual_stride, n_columns, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row for each program, read twice: for rows that registers do not hold."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + row * residual_stride + column, is_in, 0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
            tl.store(sum_ptr + row * n_columns + column, x.to(sum_ptr.dtype.element_ty), is_in)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_columns + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        if residual_ptr is not None:  # added again: what was just stored may not be visible yet
            x += tl.load(residual_ptr + row * residual_stride + column, is_in, 0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        y = x * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        tl.store(out_ptr + row * n_columns + column, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _rms_norm_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, partial_ptr,
    grad_stride, grad_sum_stride, x_stride, n_rows, n_columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every nth tile of rows and sums their part of the weight's gradient."""
    column = tl.arange(0, BLOCK)
    column_is_in = column < n_columns
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    partial = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_is_in = row < n_rows
        is_in = row_is_in[:, None] & column_is_in[None, :]
        at = grad_ptr + row[:, None] * grad_stride + column[None, :]
        grad = tl.load(at, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], is_in, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, row_is_in, 0.0)
        normed = x * rstd[:, None]
        partial += tl.sum(grad * normed, 0)
        weighted = grad * weight
        along = tl.sum(weighted * normed, 1) / n_columns
        grad_x = rstd[:, None] * (weighted - normed * along[:, None])
        if grad_sum_ptr is not None:
            at = grad_sum_ptr + row[:, None] * grad_sum_stride + column[None, :]
            grad_x += tl.load(at, is_in, 0.0).to(tl.float32)
        at = grad_x_ptr + row[:, None] * n_columns + column[None, :]
        tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), is_in)
    if partial_ptr is not None:
        at = partial_ptr + tl.program_id(0).to(tl.int64) * n_columns + column
        tl.store(at, partial, column_is_in)


@jit
def _rms_norm_wide_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr,
    grad_stride, grad_sum_stride, x_stride, n_columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row for each program, read twice; the weight's gradient is a kernel of its own."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        weighted = tl.load(grad_ptr + row * grad_stride + column, is_in, 0.0).to(tl.float32)
        if weight_ptr is not None:
            weighted *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        products += weighted * tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
    along = tl.sum(products, 0) * rstd / n_columns
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_in = column < n_columns
        weighted = tl.load(grad_ptr + row * grad_stride + column, is_in, 0.0).to(tl.float32)
        if weight_ptr is not None:
            weighted *= tl.load(weight_ptr + column, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, is_in, 0.0).to(tl.float32)
        grad_x = rstd * (weighted - x * rstd * along)
        if grad_sum_ptr is not None:
            at = grad_sum_ptr + row * grad_sum_stride + column
            grad_x += tl.load(at, is_in, 0.0).to(tl.float32)
        at = grad_x_ptr + row * n_columns + column
        tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), is_in)


@jit
def _rms_norm_weight_backward_kernel(
    grad_ptr, x_ptr, rstd_ptr, partial_ptr, grad_stride, x_stride, n_rows, n_columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Axis 0 divides the columns, axis 1 the rows: every nth tile of them, as above."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column_is_in = column < n_columns
    partial = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(n_rows, ROWS), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        is_in = (row < n_rows)[:, None] & column_is_in[None, :]
        at = grad_ptr + row[:, None] * grad_stride + column[None, :]
        grad = tl.load(at, is_in, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], is_in, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, row < n_rows, 0.0)
        partial += tl.sum(grad * x * rstd[:, None], 0)
    at = partial_ptr + tl.program_id(1).to(tl.int64) * n_columns + column
    tl.store(at, partial, column_is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, x + residual or nothing, 1 / rms of each row)"""
    rows, beside = as_rows(x), None if residual is None else as_rows(residual)
    out, summed, rstd = _fake_forward(x, residual, weight, eps)
    config = _config("rms_norm_forward", rows)
    arguments = {
        "x_ptr": rows,
        "residual_ptr": beside,
        "weight_ptr": None if weight is None else weight.contiguous(),
        "out_ptr": out,
        "sum_ptr": None if beside is None else summed,
        "rstd_ptr": rstd,
        "x_stride": rows.stride(0),
        "residual_stride": 0 if beside is None else beside.stride(0),
        "n_columns": rows.shape[1],
        "eps": eps,
    }
    if _is_wide(config, rows):
        launch(_rms_norm_wide_forward_kernel, (rows.shape[0],), _parts_of(config), **arguments)
        return out, summed, rstd
    grid = (cdiv(rows.shape[0], config["ROWS"]),)
    more = {"n_rows": rows.shape[0], "scale_ptr": None, "LARGEST": 0.0}
    launch(_rms_norm_forward_kernel, grid, config, **arguments, **more)
    return out, summed, rstd


def _launch_quantised(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed in 8 bits, x + residual or nothing, the scale of each row)"""
    rows, beside = as_rows(x), None if residual is None else as_rows(residual)
    config = _config("rms_norm_quantised", rows)
    if _is_wide(config, rows):
        normed, summed, _ = _launch_forward(x, residual, weight, eps)
        return _in_eight_bits(normed.float(), dtype)[0], summed, _in_eight_bits(normed, dtype)[1]
    out, summed, scale = _fake_quantised(x, residual, weight, eps, dtype)
    launch(
        _rms_norm_forward_kernel,
        (cdiv(rows.shape[0], config["ROWS"]),),
        config,
        x_ptr=rows,
        residual_ptr=beside,
        weight_ptr=None if weight is None else weight.contiguous(),
        out_ptr=out,
        sum_ptr=None if beside is None else summed,
        scale_ptr=scale,
        rstd_ptr=None,
        x_stride=rows.stride(0),
        residual_stride=0 if beside is None else beside.stride(0),
        n_rows=rows.shape[0],
        n_columns=rows.shape[1],
        eps=eps,
        LARGEST=_largest(dtype),
    )
    return out, summed, scale


def _launch_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of the weight or nothing); `x` is what was normed"""
    grads, rows = as_rows(grad), as_rows(x)
    beside = None if grad_sum is None else as_rows(grad_sum)
    grad_x, _ = _fake_backward(grad, grad_sum, x, weight, rstd)
    n_rows, n_columns = rows.shape
    architecture = architectures.of(x.device)
    config = _config("rms_norm_backward", rows, configurations.backward)
    programs = configurations.programs(architecture, cdiv(n_rows, config["ROWS"]))
    partial = x.new_empty((programs, n_columns), dtype=torch.float32)
    known = {
        "grad_ptr": grads,
        "x_ptr": rows,
        "rstd_ptr": rstd,
        "grad_stride": grads.stride(0),
        "x_stride": rows.stride(0),
        "n_columns": n_columns,
    }
    more = {
        "grad_sum_ptr": beside,
        "grad_sum_stride": 0 if beside is None else beside.stride(0),
        "weight_ptr": None if weight is None else weight.contiguous(),
        "grad_x_ptr": grad_x,
    }
    has_weight = weight is not None
    if not _is_wide(config, rows):
        more.update(partial_ptr=partial if has_weight else None, n_rows=n_rows)
        launch(_rms_norm_backward_kernel, (programs,), config, **known, **more)
    else:
        parts = _parts_of(config)
        launch(_rms_norm_wide_backward_kernel, (n_rows,), parts, **known, **more)
        if has_weight:
            tile = configurations.WEIGHT_BACKWARD
            grid = (cdiv(n_columns, tile["BLOCK"]), programs)
            more = {"partial_ptr": partial, "n_rows": n_rows}
            launch(_rms_norm_weight_backward_kernel, grid, tile, **known, **more)
    return grad_x, _summed(partial, weight, n_rows)


def _summed(partial: Tensor, weight: Tensor | None, n_rows: int) -> Tensor:
    if weight is None:
        return partial.new_empty(0)
    return (partial.sum(0) if n_rows else torch.zeros_like(partial[0])).to(weight.dtype)


def _config(kernel: str, rows: Tensor, candidates_of: Any = configurations.forward) -> Config:
    architecture = architectures.of(rows.device)
    candidates = candidates_of(architecture, rows.shape[1])
    return tuning.choose(kernel, architecture, (rows.shape[1], rows.dtype), candidates)


def _is_wide(config: Config, rows: Tensor) -> bool:
    return config["BLOCK"] < rows.shape[1]


def _parts_of(config: Config) -> Config:
    return Config({"BLOCK": config["BLOCK"]}, config.warps, config.stages)


# --- meaning --------------------------------------------------------------------------------------


def rms_norm_meaning(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In plain torch: (normed, x + residual or nothing, 1 / rms of each row)."""
    summed = x if residual is None else x + residual
    wide = _widened(summed)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    normed = wide * rstd.unsqueeze(-1)
    if weight is not None:
        normed = normed * _widened(weight)
    beside = x.new_empty(0) if residual is None else summed
    return normed.to(x.dtype), beside, rstd


def quantised_meaning(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    wide, beside, _ = rms_norm_meaning(
        _widened(x if residual is None else x + residual), None, weight, eps
    )
    beside = x.new_empty(0) if residual is None else x + residual
    values, scale = _in_eight_bits(wide, dtype)
    return values, beside, scale


def backward_meaning(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    wide, inverse = _widened(grad), rstd.unsqueeze(-1)
    normed = _widened(x) * inverse
    weighted = wide if weight is None else wide * _widened(weight)
    grad_x = inverse * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    if weight is None:
        return grad_x.to(x.dtype), x.new_empty(0, dtype=torch.float32)
    return grad_x.to(x.dtype), (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _in_eight_bits(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = _widened(values)
    scale = wide.abs().amax(-1).clamp_min(1e-10) / _largest(dtype)
    scaled = wide / scale.unsqueeze(-1)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype is torch.int8 else torch.finfo(dtype).max


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return alike(x), x.new_empty(0) if residual is None else alike(x), rstd


def _fake_quantised(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    _, summed, scale = _fake_forward(x, residual, weight, eps)
    return alike(x, dtype), summed, scale


def _fake_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return alike(x), x.new_empty(0, dtype=torch.float32) if weight is None else alike(weight)


_forward = operator(
    "rms_norm_forward", launcher=_launch_forward, meaning=rms_norm_meaning, fake=_fake_forward
)
_quantised = operator(
    "rms_norm_quantised",
    launcher=_launch_quantised,
    meaning=quantised_meaning,
    fake=_fake_quantised,
)
_backward = operator(
    "rms_norm_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    x, residual, weight, _ = inputs
    _, summed, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(summed if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_sum, _):
    x, weight, rstd = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None
    grad_x, grad_weight = _backward(grad, grad_sum if ctx.has_residual else None, x, weight, rstd)
    return (
        grad_x,
        grad_x if ctx.has_residual else None,
        None if weight is None else grad_weight,
        None,
    )


differentiable("rms_norm_forward", backward=_differentiate, saves=_save)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as torch.nn.RMSNorm has it."""
    _demand_fits(x, None, weight)
    return _call(x, None, weight, _eps(x, eps))[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): what a block does between two layers, in one pass."""
    _demand_fits(x, residual, weight)
    normed, summed, _ = _call(x, residual, weight, _eps(x, eps))
    return normed, summed


def rms_norm_quantised(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(rms_norm in 8 bits, the scale of each row, x + residual): values times scale is the norm.

    For inference: nothing flows back through it.
    """
    _demand_fits(x, residual, weight)
    accepted = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
    demand(dtype in accepted, f"dtype is one of {', '.join(map(str, accepted))}, not {dtype}")
    compute = _quantised if kernels_take(x, residual, weight) else quantised_meaning
    values, summed, scale = compute(x, residual, weight, _eps(x, eps), dtype)
    return values, scale, None if residual is None else summed


def _call(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    compute = _forward if kernels_take(x, residual, weight) else rms_norm_meaning
    return compute(x, residual, weight, eps)


def _eps(x: Tensor, eps: float | None) -> float:
    return torch.finfo(x.dtype).eps if eps is None else eps


def _demand_fits(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> None:
    demand(
        x.dim() > 0 and x.is_floating_point(),
        f"x is a tensor of floats with rows, not {described(x)}",
    )
    if residual is not None:
        same = residual.shape == x.shape and residual.dtype == x.dtype
        demand(same, f"residual is as x is ({described(x)}), not {described(residual)}")
    if weight is not None:
        fits = weight.shape == x.shape[-1:]
        demand(
            fits,
            f"weight has one number for each of {x.shape[-1]} columns, not {described(weight)}",
        )
