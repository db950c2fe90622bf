"""Softmax and log_softmax along any dimension, of scores that are scaled and masked on the way.

A row is read once where registers hold it, else twice: for its maximum and sum together, then for
the result. Every tensor is read where it lies: four sizes with strides of their own (three that
count rows, and the columns) describe nearly all layouts, a broadcast mask among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import softmax as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike

# --- kernels --------------------------------------------------------------------------------------


@jit
def _rows_of_program(size_b, size_c, ROWS: tl.constexpr):
    """(a, b, some c): which rows a program has, its number counted down from the innermost."""
    tiles = tl.cdiv(size_c, ROWS)
    tile = tl.program_id(0) % tiles
    outer = tl.program_id(0) // tiles
    c = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (outer // size_b).to(tl.int64), (outer % size_b).to(tl.int64), c


@jit
def _columns(start, FAR: tl.constexpr, BLOCK: tl.constexpr):
    """FAR: a row is longer in memory than 32 bits can count."""
    column = start + tl.arange(0, BLOCK)
    if FAR:
        column = column.to(tl.int64)
    return column


@jit
def _scores(x_ptrs, mask_ptrs, is_in, scale):
    """x * scale + mask, or where the mask allows; minus infinity elsewhere."""
    x = tl.load(x_ptrs, is_in, 0.0).to(tl.float32) * scale
    if mask_ptrs is not None:
        mask = tl.load(mask_ptrs, is_in, 0)
        if mask.dtype == tl.uint8:
            x = tl.where(mask != 0, x, float("-inf"))
        else:
            x += mask.to(tl.float32)
    return tl.where(is_in, x, float("-inf"))


@jit
def _softmax_forward_kernel(
    x_ptr, mask_ptr, out_ptr,
    x_a, x_b, x_c, x_column, mask_a, mask_b, mask_c, mask_column, out_a, out_b, out_c, out_column,
    size_b, size_c, n_columns, scale,
    LOG: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are read once and stay in registers."""
    a, b, c = _rows_of_program(size_b, size_c, ROWS)
    column = _columns(0, FAR, BLOCK)[None, :]
    is_in = (c < size_c)[:, None] & (column < n_columns)
    x_ptrs = x_ptr + (a * x_a + b * x_b + c * x_c)[:, None] + column * x_column
    mask_ptrs = None
    if mask_ptr is not None:
        mask_ptrs = mask_ptr + (a * mask_a + b * mask_b + c * mask_c)[:, None]
        mask_ptrs += column * mask_column
    x = _scores(x_ptrs, mask_ptrs, is_in, scale)
    x -= tl.max(x, 1)[:, None]  # minus infinity from itself is NaN, as torch has it
    power = tl.exp(x)
    total = tl.sum(power, 1)[:, None]
    y = x - tl.log(total) if LOG else power / total
    out_ptrs = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None] + column * out_column
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _softmax_wide_forward_kernel(
    x_ptr, mask_ptr, out_ptr,
    x_a, x_b, x_c, x_column, mask_a, mask_b, mask_c, mask_column, out_a, out_b, out_c, out_column,
    size_b, size_c, n_columns, scale,
    LOG: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are read twice: the sum so far is scaled when a higher score comes."""
    a, b, c = _rows_of_program(size_b, size_c, ROWS)
    row_is_in = (c < size_c)[:, None]
    x_row = x_ptr + (a * x_a + b * x_b + c * x_c)[:, None]
    if mask_ptr is not None:
        mask_row = mask_ptr + (a * mask_a + b * mask_b + c * mask_c)[:, None]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = _columns(start, FAR, BLOCK)[None, :]
        is_in = row_is_in & (column < n_columns)
        if mask_ptr is not None:
            mask_here = mask_row + column * mask_column
            x = _scores(x_row + column * x_column, mask_here, is_in, scale)
        else:
            x = _scores(x_row + column * x_column, None, is_in, scale)
        higher = tl.maximum(highest, tl.max(x, 1))
        # Minus infinity is no place to shift from; +inf and NaN find their own way into the sum.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        highest = higher
    out_row = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None]
    for start in range(0, n_columns, BLOCK):
        column = _columns(start, FAR, BLOCK)[None, :]
        is_in = row_is_in & (column < n_columns)
        if mask_ptr is not None:
            mask_here = mask_row + column * mask_column
            x = _scores(x_row + column * x_column, mask_here, is_in, scale)
        else:
            x = _scores(x_row + column * x_column, None, is_in, scale)
        x -= highest[:, None]
        y = x - tl.log(total)[:, None] if LOG else tl.exp(x) / total[:, None]
        tl.store(out_row + column * out_column, y.to(out_ptr.dtype.element_ty), is_in)


@jit
def _softmax_backward_kernel(
    grad_ptr, y_ptr, mask_ptr, out_ptr,
    grad_a, grad_b, grad_c, grad_column, y_a, y_b, y_c, y_column,
    mask_a, mask_b, mask_c, mask_column, out_a, out_b, out_c, out_column,
    size_b, size_c, n_columns, scale,
    LOG: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    a, b, c = _rows_of_program(size_b, size_c, ROWS)
    column = _columns(0, FAR, BLOCK)[None, :]
    is_in = (c < size_c)[:, None] & (column < n_columns)
    grad_ptrs = grad_ptr + (a * grad_a + b * grad_b + c * grad_c)[:, None] + column * grad_column
    y_ptrs = y_ptr + (a * y_a + b * y_b + c * y_c)[:, None] + column * y_column
    grad = tl.load(grad_ptrs, is_in, 0.0).to(tl.float32)
    y = tl.load(y_ptrs, is_in, 0.0).to(tl.float32)
    if LOG:
        grad_x = grad - tl.exp(y) * tl.sum(grad, 1)[:, None]
    else:
        grad_x = y * (grad - tl.sum(grad * y, 1)[:, None])
    if mask_ptr is not None:
        mask_ptrs = mask_ptr + (a * mask_a + b * mask_b + c * mask_c)[:, None]
        grad_x = tl.where(tl.load(mask_ptrs + column * mask_column, is_in, 0) != 0, grad_x, 0.0)
    out_ptrs = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None] + column * out_column
    tl.store(out_ptrs, (grad_x * scale).to(out_ptr.dtype.element_ty), is_in)


@jit
def _softmax_wide_backward_kernel(
    grad_ptr, y_ptr, mask_ptr, out_ptr,
    grad_a, grad_b, grad_c, grad_column, y_a, y_b, y_c, y_column,
    mask_a, mask_b, mask_c, mask_column, out_a, out_b, out_c, out_column,
    size_b, size_c, n_columns, scale,
    LOG: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    a, b, c = _rows_of_program(size_b, size_c, ROWS)
    row_is_in = (c < size_c)[:, None]
    grad_row = grad_ptr + (a * grad_a + b * grad_b + c * grad_c)[:, None]
    y_row = y_ptr + (a * y_a + b * y_b + c * y_c)[:, None]
    out_row = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None]
    if mask_ptr is not None:
        mask_row = mask_ptr + (a * mask_a + b * mask_b + c * mask_c)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = _columns(start, FAR, BLOCK)[None, :]
        is_in = row_is_in & (column < n_columns)
        grad = tl.load(grad_row + column * grad_column, is_in, 0.0).to(tl.float32)
        if LOG:
            sums += grad
        else:
            sums += grad * tl.load(y_row + column * y_column, is_in, 0.0).to(tl.float32)
    along = tl.sum(sums, 1)[:, None]
    for start in range(0, n_columns, BLOCK):
        column = _columns(start, FAR, BLOCK)[None, :]
        is_in = row_is_in & (column < n_columns)
        grad = tl.load(grad_row + column * grad_column, is_in, 0.0).to(tl.float32)
        y = tl.load(y_row + column * y_column, is_in, 0.0).to(tl.float32)
        grad_x = grad - tl.exp(y) * along if LOG else y * (grad - along)
        if mask_ptr is not None:
            allowed = tl.load(mask_row + column * mask_column, is_in, 0) != 0
            grad_x = tl.where(allowed, grad_x, 0.0)
        out_ptrs = out_row + column * out_column
        tl.store(out_ptrs, (grad_x * scale).to(out_ptr.dtype.element_ty), is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(
    x: Tensor, mask: Tensor | None, dim: int, scale: float, dtype: torch.dtype, log: bool
) -> Tensor:
    out = alike(x, dtype)
    kernels = (_softmax_forward_kernel, _softmax_wide_forward_kernel)
    tensors = {"x": x, "mask": _spread(mask, x), "out": out}
    _launch("softmax_forward", kernels, configurations.forward, tensors, dim, scale, log)
    return out


def _launch_backward(
    grad: Tensor,
    y: Tensor,
    mask: Tensor | None,
    dim: int,
    scale: float,
    dtype: torch.dtype,
    log: bool,
) -> Tensor:
    """The gradient of x; `y` is what came out. Of masks, one of booleans stands in the way."""
    out = alike(y, dtype)
    kernels = (_softmax_backward_kernel, _softmax_wide_backward_kernel)
    tensors = {"grad": grad, "y": y, "mask": _spread(mask, y), "out": out}
    _launch("softmax_backward", kernels, configurations.backward, tensors, dim, scale, log)
    return out


def _spread(mask: Tensor | None, over: Tensor) -> Tensor | None:
    """The kernels take a mask of booleans as bytes."""
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    return None if mask is None else mask.expand(over.shape)


def _launch(
    name: str,
    kernels: tuple[Any, Any],
    candidates_of: Any,
    tensors: Mapping[str, Tensor | None],
    dim: int,
    scale: float,
    log: bool,
) -> None:
    """By the first kernel where registers hold a row of all tensors, else by the second."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    views = dict(zip(given, _in_four_sizes(list(given.values()), dim), strict=True))
    first = next(iter(views.values()))
    *counts, n_columns = first.shape
    neighbours = n_columns > 1 and first.stride(3) != 1
    architecture = architectures.of(first.device)
    config: Config = tuning.choose(
        name,
        architecture,
        (n_columns, neighbours, first.dtype),
        candidates_of(architecture, n_columns, neighbours),
    )
    places: dict[str, Any] = {f"{name}_ptr": views.get(name) for name in tensors}
    for name in tensors:
        strides = views[name].stride() if name in views else (0, 0, 0, 0)
        axes = (f"{name}_{axis}" for axis in ("a", "b", "c", "column"))
        places.update(zip(axes, strides, strict=True))
    launch(
        kernels[config["BLOCK"] < n_columns],
        (counts[0] * counts[1] * cdiv(counts[2], config["ROWS"]) if n_columns else 0,),
        config,
        **places,
        size_b=counts[1],
        size_c=counts[2],
        n_columns=n_columns,
        scale=float(scale),
        LOG=log,
        FAR=any(view.stride(3) * (n_columns + config["BLOCK"]) >= 2**31 for view in views.values()),
    )


def _in_four_sizes(tensors: list[Tensor], dim: int) -> list[Tensor]:
    """Equally shaped tensors as (a, b, c, columns), the last in place of `dim`.

    Views where neighbouring dimensions can be counted as one in all of them, until three are left;
    else copies, but of the last: that is the output, and contiguous.
    """
    moved = [tensor.movedim(dim, -1) for tensor in tensors]
    groups = _counted_as_one(moved)
    if len(groups) > 3:
        packed = [tensor.contiguous() for tensor in tensors[:-1]]
        moved = [tensor.movedim(dim, -1) for tensor in (*packed, tensors[-1])]
        groups = _counted_as_one(moved)
    sizes = [math.prod(moved[0].shape[i] for i in group) for group in groups]
    shape = [1] * (3 - len(groups)) + sizes + [moved[0].shape[-1]]
    return [
        tensor.as_strided(
            shape,
            [0] * (3 - len(groups)) + [tensor.stride(g[-1]) for g in groups] + [tensor.stride(-1)],
        )
        for tensor in moved
    ]


def _counted_as_one(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The dimensions before the last, in groups that have one stride in every tensor."""
    groups: list[list[int]] = []
    for i in range(tensors[0].dim() - 1):
        size = tensors[0].shape[i]
        if size == 1:
            continue
        joins = groups and all(t.stride(groups[-1][-1]) == t.stride(i) * size for t in tensors)
        if joins:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# --- meaning --------------------------------------------------------------------------------------


def softmax_meaning(
    x: Tensor, mask: Tensor | None, dim: int, scale: float, dtype: torch.dtype, log: bool
) -> Tensor:
    """In plain torch."""
    scores = x if scale == 1.0 else x * scale
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    return (torch.log_softmax if log else torch.softmax)(scores, dim, dtype=dtype)


def backward_meaning(
    grad: Tensor,
    y: Tensor,
    mask: Tensor | None,
    dim: int,
    scale: float,
    dtype: torch.dtype,
    log: bool,
) -> Tensor:
    wide, out = _widened(grad), _widened(y)
    if log:
        grad_x = wide - out.exp() * wide.sum(dim, keepdim=True)
    else:
        grad_x = out * (wide - (wide * out).sum(dim, keepdim=True))
    if mask is not None:
        grad_x = grad_x.masked_fill(~mask, 0.0)
    return (grad_x * scale).to(dtype).contiguous()


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    x: Tensor, mask: Tensor | None, dim: int, scale: float, dtype: torch.dtype, log: bool
) -> Tensor:
    return alike(x, dtype)


def _fake_backward(
    grad: Tensor,
    y: Tensor,
    mask: Tensor | None,
    dim: int,
    scale: float,
    dtype: torch.dtype,
    log: bool,
) -> Tensor:
    return alike(y, dtype)


_forward = operator(
    "softmax_forward", launcher=_launch_forward, meaning=softmax_meaning, fake=_fake_forward
)
_backward = operator(
    "softmax_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    x, mask, ctx.dim, ctx.scale, _, ctx.log = inputs
    ctx.x_dtype = x.dtype
    stands_in_the_way = mask is not None and mask.dtype is torch.bool
    ctx.save_for_backward(output, mask if stands_in_the_way else None)


def _differentiate(ctx, grad):
    y, mask = ctx.saved_tensors
    return _backward(grad, y, mask, ctx.dim, ctx.scale, ctx.x_dtype, ctx.log), *(None,) * 5


differentiable("softmax_forward", backward=_differentiate, saves=_save)


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`, as torch.softmax has it, of x * scale with a mask.

    The mask spreads over x: booleans are True where a number counts, others are added. A row of
    which nothing counts is NaN. `dtype` is that of the result.
    """
    return _call(x, dim, scale, mask, dtype, log=False)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """log(softmax(x)), without the softmax in between; see there."""
    return _call(x, dim, scale, mask, dtype, log=True)


def _call(
    x: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype | None, log: bool
) -> Tensor:
    _demand_fits(x, dim, mask)
    takes = kernels_take(x) and _result_fits(dtype) and _mask_fits(x, mask)
    compute = _forward if takes else softmax_meaning
    return compute(x, mask, dim, scale, dtype or x.dtype, log)


def _result_fits(dtype: torch.dtype | None) -> bool:
    return dtype in (None, torch.float16, torch.bfloat16, torch.float32)


def _mask_fits(x: Tensor, mask: Tensor | None) -> bool:
    """A mask that learns is left to torch, which sums its gradient over where it spreads."""
    if mask is None or mask.dtype is torch.bool:
        return mask is None or mask.device == x.device
    return kernels_take(x, mask) and not mask.requires_grad


def _demand_fits(x: Tensor, dim: int, mask: Tensor | None) -> None:
    demand(
        x.dim() > 0 and x.is_floating_point(),
        f"x is a tensor of floats with a dimension, not {described(x)}",
    )
    there = -x.dim() <= dim < x.dim()
    choice = f"dim is one of {x.dim()} dimensions, {-x.dim()} to {x.dim() - 1}"
    demand(there, lambda: f"{choice}, not {dim}")
    if mask is not None:
        apart = f"all tensors are on one device, not on {x.device} and {mask.device}"
        demand(mask.device == x.device, apart)
        sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
        spreads = mask.dim() <= x.dim() and all(m in (1, size) for m, size in sizes)
        kind = mask.dtype is torch.bool or mask.is_floating_point()
        demand(
            spreads and kind,
            f"mask is bool or floats and spreads over {described(x)}, not {described(mask)}",
        )
