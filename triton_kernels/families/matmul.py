"""Matrix products with an epilogue: activation(a @ b + bias) * gate + residual.

Products are summed in float32 and what comes out is rounded once. Where a product has too few tiles
for the card, its depth is split and a second kernel adds the parts, always in the same order.
The way back multiplies with the same kernels; what stood before the activation is kept for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.configurations import matmul as configurations
from triton_kernels.device import activated, activation_slope
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike

# --- kernels --------------------------------------------------------------------------------------


@jit
def _tanh(x):
    """Near zero by its series: a difference of two numbers near one would lose the digits."""
    x2 = x * x
    series = x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))
    near = x * (1.0 + x2 * (-0.33333333333) + x2 * series)
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@jit
def _tanh_slope(x):
    """1 - tanh^2 where tanh is nearly one as well."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * shrunk / ((1.0 + shrunk) * (1.0 + shrunk))


@jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays, which tl.maximum would drop
    elif ACTIVATION == "squared_relu":
        x = tl.where(x < 0, 0.0, x * x)
    elif ACTIVATION == "tanh":
        x = _tanh(x)
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION != "":
        x = activated(x, ACTIVATION)
    return x


@jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x."""
    if ACTIVATION == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "squared_relu":
        slope = tl.where(x <= 0, 0.0, 2.0 * x)
    elif ACTIVATION == "tanh":
        slope = _tanh_slope(x)
    elif ACTIVATION == "sigmoid":
        slope = 0.25 * _tanh_slope(0.5 * x)
    elif ACTIVATION == "gelu_tanh":
        bent = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = tl.sigmoid(2.0 * bent) + 0.5 * x * _tanh_slope(bent) * inner
    elif ACTIVATION == "":
        slope = tl.full(x.shape, 1.0, tl.float32)
    else:
        slope = activation_slope(x, ACTIVATION)
    return slope


@jit
def _finish(
    total, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr, column_scale_ptr,
    bias_ptr, gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    batches, rows, columns, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """All that follows the sum; or the sum itself goes out, of a part of the depth."""
    if partial_ptr is not None:
        is_in = (row < rows)[:, None] & (column < columns)[None, :]
        split = tl.program_id(1).to(tl.int64) * batches + batch
        place = (split * rows + row)[:, None] * columns + column[None, :]
        tl.store(partial_ptr + place, total, is_in)
    else:
        _finish_sum(
            total, batch, row, column, out_ptr, pre_ptr, row_scale_ptr, column_scale_ptr, bias_ptr,
            gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
            gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
            rows, columns, ACTIVATION,
        )  # fmt: skip


@jit
def _finish_sum(
    total, batch, row, column, out_ptr, pre_ptr, row_scale_ptr, column_scale_ptr, bias_ptr,
    gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    rows, columns, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Scales, bias, activation, gate and residual, and the only rounding."""
    row_is_in, column_is_in = row < rows, column < columns
    is_in = row_is_in[:, None] & column_is_in[None, :]
    place = (batch * rows + row)[:, None] * columns + column[None, :]
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + row * row_scale_stride, row_is_in, 0.0)
        total = total * scale.to(tl.float32)[:, None]
    if column_scale_ptr is not None:
        scale = tl.load(column_scale_ptr + column * column_scale_stride, column_is_in, 0.0)
        total = total * scale.to(tl.float32)[None, :]
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + place, total.to(pre_ptr.dtype.element_ty), is_in)
    total = _activated(total, ACTIVATION)
    if gate_ptr is not None:
        at = batch * gate_batch + row[:, None] * gate_row + column[None, :] * gate_column
        total = total * tl.load(gate_ptr + at, is_in, 0.0).to(tl.float32)
    if residual_ptr is not None:
        at = batch * residual_batch + row[:, None] * residual_row
        at += column[None, :] * residual_column
        total = total + tl.load(residual_ptr + at, is_in, 0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), is_in)


@jit
def _finish_in_parts(
    total, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr, column_scale_ptr,
    bias_ptr, gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    batches, rows, columns,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The left half of the columns, then the right one, so often; `column` is the first part's."""
    if PARTS == 1:
        _finish(
            total, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr,
            column_scale_ptr, bias_ptr, gate_ptr, residual_ptr, row_scale_stride,
            column_scale_stride, gate_batch, gate_row, gate_column, residual_batch, residual_row,
            residual_column, batches, rows, columns, ACTIVATION,
        )  # fmt: skip
    else:
        halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _finish_in_parts(
            left, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr,
            column_scale_ptr, bias_ptr, gate_ptr, residual_ptr, row_scale_stride,
            column_scale_stride, gate_batch, gate_row, gate_column, residual_batch, residual_row,
            residual_column, batches, rows, columns, ACTIVATION, BLOCK_M, BLOCK_N // 2, PARTS // 2,
        )  # fmt: skip
        _finish_in_parts(
            right, batch, row, column + BLOCK_N // 2, out_ptr, pre_ptr, partial_ptr, row_scale_ptr,
            column_scale_ptr, bias_ptr, gate_ptr, residual_ptr, row_scale_stride,
            column_scale_stride, gate_batch, gate_row, gate_column, residual_batch, residual_row,
            residual_column, batches, rows, columns, ACTIVATION, BLOCK_M, BLOCK_N // 2, PARTS // 2,
        )  # fmt: skip


@jit
def _matmul_tiled_kernel(
    a_ptr, b_ptr, out_ptr, pre_ptr, partial_ptr, depth_scale_ptr, row_scale_ptr, column_scale_ptr,
    bias_ptr, gate_ptr, residual_ptr, a_batch, a_row, a_depth, b_batch, b_depth, b_column,
    row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    batches, rows, columns, depth,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of all batches, GROUP rows of tiles at a time so that they share what the cache
    holds of b. Axis 1: parts of the depth. EVEN: the depth is a multiple of BLOCK_K. A tile is
    finished in PARTS, for which registers suffice."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    first_down = tile // (GROUP * across) * GROUP
    group = tl.minimum(down - first_down, GROUP)
    tile_down = first_down + tile % (GROUP * across) % group
    tile_across = tile % (GROUP * across) // group

    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row, column = tile_down * BLOCK_M + row, tile_across * BLOCK_N + column
    # Beyond the edge the first rows are read again: the loop needs no masks for them.
    a_at = batch * a_batch + (row % rows).to(tl.int64)[:, None] * a_row
    b_at = batch * b_batch + (column % columns).to(tl.int64)[None, :] * b_column
    steps = tl.cdiv(depth, BLOCK_K)
    part = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * part
    inner = tl.arange(0, BLOCK_K)
    k = first.to(tl.int64) * BLOCK_K + inner
    a_at = a_ptr + (a_at + k[None, :] * a_depth)
    b_at = b_ptr + (b_at + k[:, None] * b_depth)
    a_step = tl.cast(a_depth, tl.int64) * BLOCK_K
    b_step = tl.cast(b_depth, tl.int64) * BLOCK_K
    # How many products of 8-bit floats sm90 may add up in the 14 bits of its matrix units before
    # float32 takes over. With 0 the compiler would leave these units alone.
    most: tl.constexpr = BLOCK_K if BLOCK_K < 128 else 128
    IMPRECISE: tl.constexpr = most if a_ptr.dtype.element_ty.is_fp8() else 0
    whole: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if whole else tl.float32)
    for step in range(first, tl.minimum(first + part, steps)):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            is_in = inner < depth - step * BLOCK_K
            a = tl.load(a_at, is_in[None, :], 0.0)
            b = tl.load(b_at, is_in[:, None], 0.0)
        if depth_scale_ptr is not None:
            is_in = inner < depth - step * BLOCK_K
            scale = tl.load(depth_scale_ptr + step * BLOCK_K + inner, is_in, 0.0)
            b = b.to(tl.float32) * scale.to(tl.float32)[:, None]
        if a_ptr.dtype.element_ty.primitive_bitwidth > 8:
            b = b.to(a_ptr.dtype.element_ty)
        total = tl.dot(
            a, b, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=total.dtype
        )
        a_at += a_step
        b_at += b_step

    row = row.to(tl.int64)
    column = tile_across.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N // PARTS)
    total = total.to(tl.float32)
    _finish_in_parts(
        total, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr, column_scale_ptr,
        bias_ptr, gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
        gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
        batches, rows, columns, ACTIVATION, BLOCK_M, BLOCK_N, PARTS,
    )  # fmt: skip


@jit
def _matmul_vector_kernel(
    a_ptr, b_ptr, out_ptr, pre_ptr, partial_ptr, depth_scale_ptr, row_scale_ptr, column_scale_ptr,
    bias_ptr, gate_ptr, residual_ptr, a_batch, a_row, a_depth, b_batch, b_depth, b_column,
    row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    batches, rows, columns, depth,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All rows by BLOCK_N columns: b is read once, nothing waits for the matrix units."""
    across = tl.cdiv(columns, BLOCK_N)
    batch = (tl.program_id(0) // across).to(tl.int64)
    row = tl.arange(0, ROWS).to(tl.int64)
    column = (tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_is_in, column_is_in = row < rows, column < columns
    steps = tl.cdiv(depth, BLOCK_K)
    part = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * part
    products = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for step in range(first, tl.minimum(first + part, steps)):
        k = tl.cast(step, tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_is_in = k < depth
        a_at = a_ptr + batch * a_batch + row[:, None] * a_row + k[None, :] * a_depth
        b_at = b_ptr + batch * b_batch + column[:, None] * b_column + k[None, :] * b_depth
        a = tl.load(a_at, row_is_in[:, None] & k_is_in[None, :], 0.0).to(tl.float32)
        b = tl.load(b_at, column_is_in[:, None] & k_is_in[None, :], 0.0).to(tl.float32)
        if depth_scale_ptr is not None:
            b *= tl.load(depth_scale_ptr + k, k_is_in, 0.0).to(tl.float32)[None, :]
        products += a[:, None, :] * b[None, :, :]
    total = tl.sum(products, 2)
    _finish(
        total, batch, row, column, out_ptr, pre_ptr, partial_ptr, row_scale_ptr, column_scale_ptr,
        bias_ptr, gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
        gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
        batches, rows, columns, ACTIVATION,
    )  # fmt: skip


@jit
def _matmul_combine_kernel(
    out_ptr, pre_ptr, partial_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, gate_ptr,
    residual_ptr, row_scale_stride, column_scale_stride,
    gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
    batches, rows, columns, splits,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the parts of the depth, the first one first, and goes on as an undivided product."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = (tl.program_id(0) % (down * across)).to(tl.int64)
    row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = (row < rows)[:, None] & (column < columns)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(splits):
        at = (tl.cast(split, tl.int64) * batches + batch) * rows + row
        total += tl.load(partial_ptr + at[:, None] * columns + column[None, :], is_in, 0.0)
    _finish_sum(
        total, batch, row, column, out_ptr, pre_ptr, row_scale_ptr, column_scale_ptr, bias_ptr,
        gate_ptr, residual_ptr, row_scale_stride, column_scale_stride,
        gate_batch, gate_row, gate_column, residual_batch, residual_row, residual_column,
        rows, columns, ACTIVATION,
    )  # fmt: skip


@jit
def _matmul_epilogue_backward_kernel(
    grad_ptr, pre_ptr, gate_ptr, grad_pre_ptr, grad_gate_ptr, partial_ptr,
    grad_batch, grad_row, grad_column, gate_batch, gate_row, gate_column,
    rows, columns, all_rows,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Axis 0 divides the columns; on axis 1 each program takes every nth tile of rows of all
    batches and sums their part of the bias' gradient."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column_is_in = column < columns
    partial = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(all_rows, ROWS), tl.num_programs(1)):
        line = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        batch, row = line // rows, line % rows
        is_in = (line < all_rows)[:, None] & column_is_in[None, :]
        place = line[:, None] * columns + column[None, :]
        at = (batch * grad_batch + row * grad_row)[:, None] + column[None, :] * grad_column
        grad = tl.load(grad_ptr + at, is_in, 0.0).to(tl.float32)
        if pre_ptr is not None:
            pre = tl.load(pre_ptr + place, is_in, 0.0).to(tl.float32)
            if gate_ptr is not None:
                at = (batch * gate_batch + row * gate_row)[:, None] + column[None, :] * gate_column
                gate = tl.load(gate_ptr + at, is_in, 0.0).to(tl.float32)
                if grad_gate_ptr is not None:
                    grad_gate = grad * _activated(pre, ACTIVATION)
                    tl.store(
                        grad_gate_ptr + place, grad_gate.to(grad_gate_ptr.dtype.element_ty), is_in
                    )
                grad *= gate
            grad *= _slope(pre, ACTIVATION)
            # A padded lane may hold no number: 0 times the slope of what is not there.
            grad = tl.where(is_in, grad, 0.0)
        if grad_pre_ptr is not None:
            tl.store(grad_pre_ptr + place, grad.to(grad_pre_ptr.dtype.element_ty), is_in)
        partial += tl.sum(grad, 0)
    if partial_ptr is not None:
        at = partial_ptr + tl.program_id(1).to(tl.int64) * columns + column
        tl.store(at, partial, column_is_in)


# --- launchers ------------------------------------------------------------------------------------


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    pre: Tensor | None = None,
    depth_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    precision: str = "",
) -> None:
    """out = activation(a @ b * scales + bias) * gate + residual, all of them with a batch first.

    `pre` receives what the activation is given. Scales of one element count for every row, column.
    """
    (batches, rows, depth), columns = a.shape, b.shape[2]
    architecture = architectures.of(a.device)
    precision = precision_of(a.dtype, precision, architecture)
    is_vector = takes_vector_kernel(rows)
    config = _config(architecture, a, b, out, precision)
    tiles = configurations.programs(config, batches, rows, columns)
    splits = configurations.splits(architecture, tiles, depth)
    ending = {
        "out_ptr": out,
        "pre_ptr": pre,
        "row_scale_ptr": row_scale,
        "column_scale_ptr": column_scale,
        "bias_ptr": None if bias is None else bias.contiguous(),
        "gate_ptr": gate,
        "residual_ptr": residual,
        "row_scale_stride": _scale_stride(row_scale),
        "column_scale_stride": _scale_stride(column_scale),
        **_strides("gate", ("batch", "row", "column"), gate),
        **_strides("residual", ("batch", "row", "column"), residual),
        "batches": batches,
        "rows": rows,
        "columns": columns,
        "ACTIVATION": activation,
    }
    partial = None
    if splits > 1:
        partial = a.new_empty((splits, batches, rows, columns), dtype=torch.float32)
    more: dict[str, Any] = {
        "a_ptr": a,
        "b_ptr": b,
        "partial_ptr": partial,
        "depth_scale_ptr": None if depth_scale is None else depth_scale.contiguous(),
        "depth": depth,
        **_strides("a", ("batch", "row", "depth"), a),
        **_strides("b", ("batch", "depth", "column"), b),
    }
    kernel = _matmul_vector_kernel if is_vector else _matmul_tiled_kernel
    if not is_vector:
        more.update(PRECISION=precision, EVEN=depth % config["BLOCK_K"] == 0)
    launch(kernel, (tiles, splits), config, **ending, **more)
    if partial is not None:
        tile = configurations.COMBINE
        grid = (configurations.programs(tile, batches, rows, columns),)
        launch(_matmul_combine_kernel, grid, tile, **ending, partial_ptr=partial, splits=splits)


def takes_vector_kernel(rows: int) -> bool:
    """Few rows wait for memory only; more are multiplied by the matrix units, 16 at least."""
    return rows <= configurations.VECTOR_ROWS


def precision_of(dtype: torch.dtype, asked: str, architecture: Architecture) -> str:
    """How float32 is multiplied: "ieee", or "tf32" where that is wanted and there."""
    if dtype is not torch.float32 or "tf32" not in architecture.flops_per_second:
        return "ieee"
    return asked or _torchs_precision()


def _torchs_precision() -> str:
    setting: Any = torch.backends.cuda.matmul
    if hasattr(setting, "fp32_precision"):  # torch 2.9: then the older names may refuse to answer
        return "tf32" if setting.fp32_precision == "tf32" else "ieee"
    return "tf32" if setting.allow_tf32 else "ieee"


def _config(
    architecture: Architecture, a: Tensor, b: Tensor, out: Tensor, precision: str
) -> Config:
    sizes = (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    if takes_vector_kernel(sizes[1]):
        deep = b.stride(1) == 1
        candidates = configurations.vector(architecture, sizes[1], b.dtype.itemsize, deep)
        few = (sizes[1], sizes[2], sizes[3], b.dtype, deep)
        return tuning.choose("matmul_vector", architecture, few, candidates)
    single = a.dtype is torch.float32 and precision == "ieee"
    candidates = configurations.tiled(
        architecture,
        sizes,
        a.dtype.itemsize,
        out.dtype.itemsize,
        is_aligned=_is_aligned(a) and _is_aligned(b),
        by_lanes=single and not _multiplies_float32(architecture),
        is_fp8=a.dtype.is_floating_point and a.dtype.itemsize == 1,
    )
    layout = (a.stride(2) == 1, b.stride(1) == 1)
    near = (sizes[0], power_of_two(sizes[1]), sizes[2], sizes[3])
    problem = (*near, a.dtype, b.dtype, out.dtype, precision, *layout)
    return tuning.choose("matmul_tiled", architecture, problem, candidates)


def _is_aligned(tensor: Tensor) -> bool:
    """Numbers lie side by side along one axis, and lines of them start at multiples of 16 bytes."""
    _, *strides = tensor.stride()
    return min(strides) <= 1 and max(strides) * tensor.dtype.itemsize % 16 == 0


def _multiplies_float32(architecture: Architecture) -> bool:
    """Matrix units that take float32 as it is: AMD's data center cards."""
    return architecture.matrix_instruction == "v_mfma"


def _strides(name: str, axes: tuple[str, str, str], tensor: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if tensor is None else tensor.stride()
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _scale_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _launch_forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    precision: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(the product with everything after it, what the activation was given or nothing)"""
    out, pre = _fake_forward(a, b, bias, gate, residual, activation, out_dtype, precision, keep)
    multiply(
        a,
        b,
        out,
        pre=pre if keep else None,
        bias=bias,
        gate=gate,
        residual=residual,
        activation=activation,
        precision=precision,
    )
    return out, pre


def _launch_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    pre: Tensor | None,
    gate: Tensor | None,
    activation: str,
    precision: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, b, bias and gate, as far as `wanted`; `pre` where the epilogue needs it."""
    grads = _fake_backward(grad, a, b, pre, gate, activation, precision, wanted)
    grad_a, grad_b, grad_bias, grad_gate = grads
    wants_a, wants_b, wants_bias, wants_gate = wanted
    grad_pre = grad
    if pre is not None or wants_bias:
        grad_pre = alike(grad, a.dtype) if pre is not None else grad
        stored = None if pre is None else grad_pre
        held = grad_gate if wants_gate else None
        partial = _launch_epilogue_backward(grad, pre, gate, activation, stored, held, wants_bias)
        if wants_bias:
            grad_bias = partial.sum(0)
    grad_pre = grad_pre.to(a.dtype)
    if wants_a:
        multiply(grad_pre, b.mT, grad_a, precision=precision)
    if wants_b:
        multiply(a.mT, grad_pre, grad_b, precision=precision)
    return grad_a, grad_b, grad_bias, grad_gate


def _launch_epilogue_backward(
    grad: Tensor,
    pre: Tensor | None,
    gate: Tensor | None,
    activation: str,
    grad_pre: Tensor | None,
    grad_gate: Tensor | None,
    wants_bias: bool,
) -> Tensor:
    """Fills both gradients; what comes back has to be summed for that of the bias."""
    batches, rows, columns = grad.shape
    config = configurations.BACKWARD
    row_tiles = cdiv(batches * rows, config["ROWS"])
    programs = configurations.backward_programs(architectures.of(grad.device), row_tiles)
    if not batches * rows:
        return grad.new_zeros((1, columns), dtype=torch.float32)
    partial = grad.new_empty((programs, columns), dtype=torch.float32)
    launch(
        _matmul_epilogue_backward_kernel,
        (cdiv(columns, config["BLOCK"]), programs),
        config,
        grad_ptr=grad,
        pre_ptr=pre,
        gate_ptr=gate,
        grad_pre_ptr=grad_pre,
        grad_gate_ptr=grad_gate,
        partial_ptr=partial if wants_bias else None,
        **_strides("grad", ("batch", "row", "column"), grad),
        **_strides("gate", ("batch", "row", "column"), gate),
        rows=rows,
        columns=columns,
        all_rows=batches * rows,
        ACTIVATION=activation,
    )
    return partial


# --- meaning --------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: torch.relu(x).square(),
}


def matmul_meaning(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    precision: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """In plain torch: (the product with everything after it, what the activation was given)."""
    # Torch's own product: it sums in float32 too, and rounds before what comes after.
    product = a @ b if out_dtype is a.dtype else _widened(a) @ _widened(b)
    if not activation and bias is None and gate is None and residual is None:
        return product.to(out_dtype), product.to(out_dtype) if keep else a.new_empty(0)
    wide = _widened(product)
    if bias is not None:
        wide = wide + _widened(bias)
    pre = wide.to(out_dtype) if keep else a.new_empty(0, dtype=out_dtype)
    wide = _ACTIVATIONS[activation](wide)
    if gate is not None:
        wide = wide * _widened(gate)
    if residual is not None:
        wide = wide + _widened(residual)
    return wide.to(out_dtype), pre


def backward_meaning(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    pre: Tensor | None,
    gate: Tensor | None,
    activation: str,
    precision: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In plain torch: gradients of a, b, bias and gate, empty where they are not wanted."""
    wide = _widened(grad)
    grads = list(_fake_backward(grad, a, b, pre, gate, activation, precision, wanted))
    if pre is not None:
        given = _widened(pre)
        if gate is not None:
            if wanted[3]:
                grads[3] = (wide * _ACTIVATIONS[activation](given)).to(gate.dtype)
            wide = wide * _widened(gate)
        wide = wide * _slope_meaning(given, activation)
    grad_pre = wide.to(a.dtype)
    if wanted[0]:
        grads[0] = grad_pre @ b.mT
    if wanted[1]:
        grads[1] = a.mT @ grad_pre
    if wanted[2]:
        grads[2] = wide.sum((0, 1))
    return grads[0], grads[1], grads[2], grads[3]


def _slope_meaning(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return (~(x <= 0)).to(x.dtype)
    if activation == "squared_relu":
        return 2 * torch.relu(x)
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    if activation == "gelu_tanh":
        factor = math.sqrt(2 / math.pi)
        tanh = torch.tanh(factor * (x + 0.044715 * x**3))
        inner = factor * (1 + 3 * 0.044715 * x * x)
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner
    if activation == "tanh":
        return 1 - torch.tanh(x).square()
    sigmoid = torch.sigmoid(x)
    if activation == "silu":
        return sigmoid * (1 + x * (1 - sigmoid))
    return sigmoid * (1 - sigmoid) if activation == "sigmoid" else torch.ones_like(x)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    precision: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    shape = (a.shape[0], a.shape[1], b.shape[2])
    out = a.new_empty(shape, dtype=out_dtype)
    return out, a.new_empty(shape if keep else 0, dtype=out_dtype)


def _fake_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    pre: Tensor | None,
    gate: Tensor | None,
    activation: str,
    precision: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nothing = a.new_empty
    return (
        alike(a) if wanted[0] else nothing(0),
        alike(b) if wanted[1] else nothing(0),
        nothing(b.shape[2] if wanted[2] else 0, dtype=torch.float32),
        alike(gate) if gate is not None and wanted[3] else nothing(0),
    )


_forward = operator(
    "matmul_forward", launcher=_launch_forward, meaning=matmul_meaning, fake=_fake_forward
)
_backward = operator(
    "matmul_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    a, b, bias, gate, residual, activation, _, precision, keep = inputs
    _, pre = output
    ctx.save_for_backward(a, b, bias, gate, pre if keep else None)
    ctx.activation, ctx.precision = activation, precision
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 9
    a, b, bias, gate, pre = ctx.saved_tensors
    activation, precision = ctx.activation, ctx.precision
    wants = ctx.needs_input_grad
    if not activation and gate is None:
        pre = None  # the gradient goes through as it comes
    elif pre is None:  # not kept: worked out again
        pre, _ = _forward(a, b, bias, None, None, "", grad.dtype, precision, False)
    grad_a, grad_b, grad_bias, grad_gate = _backward(
        grad, a, b, pre, gate, activation, precision, [bool(one) for one in wants[:4]]
    )
    return (
        grad_a if wants[0] else None,
        grad_b if wants[1] else None,
        grad_bias.to(bias.dtype) if wants[2] else None,
        grad_gate if wants[3] else None,
        grad.to(ctx.residual_dtype) if wants[4] else None,
        *(None,) * 4,
    )


differentiable("matmul_forward", backward=_differentiate, saves=_save)

_ROUNDS_TO = (torch.float16, torch.bfloat16, torch.float32)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> Tensor:
    """activation(a @ b + bias) * gate + residual, with batches as torch.matmul has them.

    `transpose_b`: b is (columns, depth), as the weight of torch.nn.Linear is. `activation`: None,
    relu, gelu, gelu_tanh, silu, tanh, sigmoid or squared_relu. Gate and residual broadcast to the
    product. `precision` of float32: "ieee" or "tf32"; None is what torch is set to.
    """
    demand(b.dim() >= 2, f"b has at least two dimensions, not {described(b)}")
    right = b.mT if transpose_b else b
    _demand_fits(a, right, bias)
    demand(
        activation is None or activation in _ACTIVATIONS,
        f"activation is one of {', '.join(filter(None, _ACTIVATIONS))} or None, not {activation!r}",
    )
    demand(precision in (None, "ieee", "tf32"), f"precision is 'ieee' or 'tf32', not {precision!r}")
    dtype = out_dtype or a.dtype
    demand(dtype.is_floating_point, f"out_dtype is a dtype of floats, not {dtype}")
    batch = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    shape = (*batch, a.shape[-2], right.shape[-1])
    for name, beside in (("gate", gate), ("residual", residual)):
        fits = beside is None or _broadcasts(beside.shape, shape)
        demand(
            fits,
            f"{name} broadcasts to {list(shape)}, not {beside is not None and described(beside)}",
        )
    left, right = _as_batches(a, right, batch)
    flat = (left.shape[0], left.shape[1], right.shape[2])
    gate, residual = _beside(gate, shape, flat), _beside(residual, shape, flat)
    given = (left, right, bias, gate, residual)
    keep = (
        (bool(activation) or gate is not None)
        and torch.is_grad_enabled()
        and any(one is not None and one.requires_grad for one in given)
    )
    takes = kernels_take(*given) and dtype in _ROUNDS_TO and max(*flat, left.shape[2]) < 2**30
    compute = _forward if takes else matmul_meaning
    return compute(*given, activation or "", dtype, precision or "", keep)[0].view(shape)


def _as_batches(a: Tensor, b: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """(batches, rows, depth) and (batches, depth, columns); one shared b is one long product."""
    if b.dim() == 2:
        return a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1]), b.unsqueeze(0)
    count = math.prod(batch)
    left = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    return left, b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])


def _beside(
    tensor: Tensor | None, shape: tuple[int, ...], flat: tuple[int, int, int]
) -> Tensor | None:
    return None if tensor is None else tensor.expand(shape).reshape(flat)


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        mine == 1 or mine == theirs
        for mine, theirs in zip(reversed(shape), reversed(to), strict=False)
    )


def _demand_fits(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    demand(a.dim() >= 2, f"a has at least two dimensions, not {described(a)}")
    demand(a.is_floating_point(), f"a holds floats, not {described(a)}")
    demand(a.dtype == b.dtype, f"b is of a's {a.dtype}, not {described(b)}")
    fits = a.shape[-1] == b.shape[-2]
    demand(fits, f"b has a row for each of a's {a.shape[-1]} columns, not {described(b)}")
    pairs = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    together = all(mine == theirs or mine == 1 or theirs == 1 for mine, theirs in pairs)
    demand(together, f"batches of a and b broadcast, not {described(a)} and {described(b)}")
    if bias is not None:
        fits = bias.shape == b.shape[-1:]
        demand(
            fits, f"bias has one number for each of {b.shape[-1]} columns, not {described(bias)}"
        )
