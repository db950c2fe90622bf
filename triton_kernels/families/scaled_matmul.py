"""Products of numbers of 8 bits that carry scales, and the quantisation that makes them.

(a @ b) * scale_a * scale_b + bias, with a scale for each tensor or for each row of a and column of
b. 8-bit floats are added up in float32 (on sm90 128 at a time, which its matrix units add in fewer
bits), int8 in int32: the scales come after the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import scaled_matmul as configurations
from triton_kernels.device import rounded
from triton_kernels.errors import demand, described
from triton_kernels.families.matmul import multiply
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import kernels_take, operator
from triton_kernels.rows import alike, as_rows

_EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
_EIGHT_BITS = (torch.int8, *_EIGHT_BIT_FLOATS)
_ROUNDS_TO = (torch.float16, torch.bfloat16, torch.float32)
LONGEST_INT8 = 1 << 17  # products of 127 * 127 that an int32 holds

# --- kernels --------------------------------------------------------------------------------------


@jit
def _scale_of(x, LARGEST: tl.constexpr):
    """What makes the largest of each row LARGEST; NaN where a row has one, as torch.amax has it."""
    nan = tl.max((x != x).to(tl.int32), 1) > 0
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / LARGEST
    return tl.where(nan, float("nan"), scale)


@jit
def _store_scaled(values_ptr, place, x, scale, is_in):
    y = x / scale[:, None]
    if values_ptr.dtype.element_ty == tl.int8:
        y = rounded(y)
    tl.store(values_ptr + place, y.to(values_ptr.dtype.element_ty), is_in)


@jit
def _quantise_rows_kernel(
    x_ptr, values_ptr, scale_ptr, x_stride, n_rows, n_columns,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WHOLE rows stay in registers; longer ones are read twice."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_is_in = row < n_rows
    column = tl.arange(0, BLOCK)
    is_in = row_is_in[:, None] & (column < n_columns)[None, :]
    at = x_ptr + row[:, None] * x_stride + column[None, :]
    place = row[:, None] * n_columns + column[None, :]
    x = tl.load(at, is_in, 0.0).to(tl.float32)
    scale = _scale_of(x, LARGEST)
    if WHOLE:
        tl.store(scale_ptr + row, scale, row_is_in)
        _store_scaled(values_ptr, place, x, scale, is_in)
    else:
        for start in range(BLOCK, n_columns, BLOCK):
            is_in = row_is_in[:, None] & (start + column < n_columns)[None, :]
            more = _scale_of(tl.load(at + start, is_in, 0.0).to(tl.float32), LARGEST)
            # NaN is larger than nothing, but it stays.
            scale = tl.where((more > scale) | (more != more), more, scale)
        tl.store(scale_ptr + row, scale, row_is_in)
        for start in range(0, n_columns, BLOCK):
            is_in = row_is_in[:, None] & (start + column < n_columns)[None, :]
            x = tl.load(at + start, is_in, 0.0).to(tl.float32)
            _store_scaled(values_ptr, place + start, x, scale, is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a (rows, depth), b (depth, columns), scales as vectors."""
    if not _multiplies(a) or not _multiplies(b):
        return scaled_meaning(a, b, scale_a, scale_b, bias, out_dtype)
    out = _fake_scaled(a, b, scale_a, scale_b, bias, out_dtype)
    batched = (a.unsqueeze(0), b.unsqueeze(0), out.unsqueeze(0))
    multiply(*batched, row_scale=scale_a, column_scale=scale_b, bias=bias)
    return out


def _multiplies(tensor: Tensor) -> bool:
    """Which 8-bit floats there are differs between cards; whole numbers all of them have."""
    known = (*architectures.of(tensor.device).fp8, "int8")
    return str(tensor.dtype).removeprefix("torch.") in known


def _launch_quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in 8 bits, the scale of each row)"""
    rows = as_rows(x)
    values, scale = _fake_quantise(x, dtype)
    architecture = architectures.of(x.device)
    candidates = configurations.quantise(architecture, rows.shape[1])
    problem = (rows.shape[1], rows.dtype, dtype)
    config = tuning.choose("quantise_rows", architecture, problem, candidates)
    launch(
        _quantise_rows_kernel,
        (cdiv(rows.shape[0], config["ROWS"]),),
        config,
        x_ptr=rows,
        values_ptr=values,
        scale_ptr=scale,
        x_stride=rows.stride(0),
        n_rows=rows.shape[0],
        n_columns=rows.shape[1],
        WHOLE=config["BLOCK"] >= rows.shape[1],
        LARGEST=_largest(dtype),
    )
    return values, scale


# --- meaning --------------------------------------------------------------------------------------


def scaled_meaning(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """In plain torch: float32 holds every number of 8 bits."""
    out = (a.float() @ b.float()) * scale_a.float().unsqueeze(1) * scale_b.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)


def quantise_meaning(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In plain torch: (values in 8 bits, the scale of each row)."""
    wide = x if x.dtype is torch.float64 else x.float()
    largest = wide.abs().amax(-1) if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    scale = largest.clamp_min(1e-10) / _largest(dtype)
    scaled = wide / scale.unsqueeze(-1)
    values = (scaled.round() if dtype is torch.int8 else scaled).to(dtype)
    return values, scale.float()


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype is torch.int8 else torch.finfo(dtype).max


# --- registration ---------------------------------------------------------------------------------


def _fake_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _fake_quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return alike(x, dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


_scaled = operator(
    "scaled_matmul", launcher=_launch_scaled, meaning=scaled_meaning, fake=_fake_scaled
)
_quantise = operator(
    "quantise_rows", launcher=_launch_quantise, meaning=quantise_meaning, fake=_fake_quantise
)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(a @ b) * scale_a * scale_b + bias, for a and b of 8-bit floats or of int8.

    `scale_a`: one number, or one for each row of a; `scale_b`: one, or one for each column of b.
    Where the GPU's matrix units do not have the dtype it is computed in plain torch. For inference:
    nothing flows back through it.
    """
    _demand_fits(a, b, bias)
    rows, columns = math.prod(a.shape[:-1]), b.shape[1]
    _demand_scale("scale_a", scale_a, rows, "rows of a")
    _demand_scale("scale_b", scale_b, columns, "columns of b")
    demand(out_dtype in _ROUNDS_TO, f"out_dtype is one of {_names(_ROUNDS_TO)}, not {out_dtype}")
    flat = a.reshape(rows, a.shape[-1])
    numbers = (flat, b, scale_a.reshape(-1), scale_b.reshape(-1), bias)
    takes = kernels_take(*numbers, dtypes=frozenset((*_EIGHT_BITS, *_ROUNDS_TO)))
    out = (_scaled if takes else scaled_meaning)(*numbers, out_dtype)
    return out.view(*a.shape[:-1], columns)


def quantise_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """(values in 8 bits, the scale of each row): values * scale is x, the largest uses all bits.

    A row with NaN has a scale of NaN. Nothing flows back through it.
    """
    demand(
        x.dim() > 0 and x.is_floating_point(),
        f"x is a tensor of floats with rows, not {described(x)}",
    )
    demand(dtype in _EIGHT_BITS, f"dtype is one of {_names(_EIGHT_BITS)}, not {dtype}")
    values, scale = (_quantise if kernels_take(x) else quantise_meaning)(x.detach(), dtype)
    return values, scale


def _demand_fits(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    both = a.dtype is torch.int8 and b.dtype is torch.int8
    both |= a.dtype in _EIGHT_BIT_FLOATS and b.dtype in _EIGHT_BIT_FLOATS
    demand(
        both, f"a and b are both 8-bit floats or both int8, not {described(a)} and {described(b)}"
    )
    fits = a.dim() >= 2 and b.dim() == 2 and a.shape[-1] == b.shape[0]
    demand(
        fits,
        f"b is a matrix with a row for each column of a, not {described(b)} for {described(a)}",
    )
    short = a.dtype is not torch.int8 or a.shape[-1] <= LONGEST_INT8
    demand(short, f"an int8 a has at most {LONGEST_INT8} columns, not {a.shape[-1]}")
    if bias is not None:
        fits = bias.shape == b.shape[1:] and bias.is_floating_point()
        demand(fits, f"bias has one float for each of {b.shape[1]} columns, not {described(bias)}")


def _demand_scale(name: str, scale: Tensor, count: int, of: str) -> None:
    fits = scale.numel() == 1 or scale.numel() == count
    fits = fits and scale.is_floating_point()
    wanted = f"{name} has one float, or one for each"
    demand(fits, lambda: f"{wanted} of the {count} {of}, not {described(scale)}")


def _names(dtypes: tuple[Any, ...]) -> str:
    return ", ".join(map(str, dtypes))
