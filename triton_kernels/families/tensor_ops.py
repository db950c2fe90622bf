"""Copies that change where numbers lie: transpose, concat, slice and pad.

One kernel moves bits from strides to strides, so every dtype comes out exactly. A tile spans the
dimension whose neighbours lie side by side in the source and that of the target: both are read and
written in whole lines of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import tensor_ops as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOVED = frozenset(
    {
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    }
)

# --- kernels --------------------------------------------------------------------------------------


@jit
def _copy_kernel(
    source_ptr, target_ptr, value_ptr, sizes, source_strides, target_strides, before, limits,
    PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All tuples are by dimension, rows and columns last; programs count tiles from the last.

    With PADDED the source begins `before` numbers later and has `limits` of them; around it stands
    the number at value_ptr, or zero.
    """
    last: tl.constexpr = len(sizes) - 1
    across = tl.cast(tl.cdiv(sizes[last], BLOCK), tl.int32)
    down = tl.cast(tl.cdiv(sizes[last - 1], ROWS), tl.int32)
    tile = tl.program_id(0)
    column = (tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = tile // across
    row = (tile % down).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    tile = tile // down
    is_in = (row < sizes[last - 1]) & (column < sizes[last])
    target = target_ptr + row * target_strides[last - 1] + column * target_strides[last]
    row -= before[last - 1]
    column -= before[last]
    source = source_ptr + row * source_strides[last - 1] + column * source_strides[last]
    is_inside = is_in
    if PADDED:
        is_inside &= (row >= 0) & (row < limits[last - 1])
        is_inside &= (column >= 0) & (column < limits[last])
    for outer in tl.static_range(last - 1):  # from near to far
        index = (tile % sizes[last - 2 - outer]).to(tl.int64)
        tile = tile // sizes[last - 2 - outer]
        target += index * target_strides[last - 2 - outer]
        index -= before[last - 2 - outer]
        source += index * source_strides[last - 2 - outer]
        if PADDED:
            is_inside &= (index >= 0) & (index < limits[last - 2 - outer])
    if value_ptr is None:
        found = tl.load(source, is_inside, 0)
    else:
        found = tl.load(source, is_inside, tl.load(value_ptr))
    tl.store(target, found, is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    out = _fake_transpose(x, dim0, dim1)
    _copy(x.transpose(dim0, dim1), out)
    return out


def _launch_concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    out = _fake_concat(tensors, dim)
    start = 0
    for tensor in tensors:
        _copy(tensor, out.narrow(dim, start, tensor.shape[dim]))
        start += tensor.shape[dim]
    return out


def _launch_slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    out = _fake_slice(x, dim, start, stop, step)
    _copy(_part(x, dim, start, stop, step), out)
    return out


def _launch_slice_backward(
    grad: Tensor, size: int, dim: int, start: int, stop: int, step: int
) -> Tensor:
    if step == 1:
        before = [0] * grad.dim()
        before[dim] = start
        out = _fake_slice_backward(grad, size, dim, start, stop, step)
        _copy(grad, out, before)
        return out
    out = torch.zeros_like(_fake_slice_backward(grad, size, dim, start, stop, step))
    _copy(grad, _part(out, dim, start, stop, step))
    return out


def _launch_pad(x: Tensor, pad: Sequence[int], value: float) -> Tensor:
    out = _fake_pad(x, pad, value)
    # Of every dtype and on the device, without a look at its bits from here.
    is_zero = value == 0 and math.copysign(1, value) > 0
    filling = None if is_zero else x.new_full((1,), value)
    _copy(x, out, _before(x, pad), filling)
    return out


@dataclass
class _Dim:
    """One dimension of the target, and where along it the source begins and how long it is."""

    size: int
    source: int  # strides
    target: int
    before: int
    limit: int

    @property
    def is_padded(self) -> bool:
        return self.before != 0 or self.limit != self.size


def _copy(
    source: Tensor, target: Tensor, before: Sequence[int] = (), filling: Tensor | None = None
) -> None:
    """Every number of the target: from the source, which begins `before` its beginning."""
    dims = _ordered(_folded(_dims(source, target, before or [0] * target.dim())))
    *_, rows, columns = dims
    itemsize = target.dtype.itemsize
    bits = _BITS[itemsize]
    crossed = rows.size > 1 and rows.source < columns.source
    architecture = architectures.of(target.device)
    config = tuning.choose(
        "copy",
        architecture,
        (rows.size, columns.size, itemsize, crossed),
        configurations.tiles(architecture, rows.size, columns.size, itemsize, crossed),
    )
    programs = cdiv(rows.size, config["ROWS"]) * cdiv(columns.size, config["BLOCK"])
    for dim in dims[:-2]:
        programs *= dim.size
    launch(
        _copy_kernel,
        (programs,),
        config,
        source_ptr=source.view(bits),
        target_ptr=target.view(bits),
        value_ptr=None if filling is None else filling.view(bits),
        sizes=tuple(dim.size for dim in dims),
        source_strides=tuple(dim.source for dim in dims),
        target_strides=tuple(dim.target for dim in dims),
        before=tuple(dim.before for dim in dims),
        limits=tuple(dim.limit for dim in dims),
        PADDED=any(dim.is_padded for dim in dims),
    )


def _dims(source: Tensor, target: Tensor, before: Sequence[int]) -> list[_Dim]:
    strides = source.stride(), target.stride()
    return [_Dim(*one) for one in zip(target.shape, *strides, before, source.shape, strict=True)]


def _folded(dims: list[_Dim]) -> list[_Dim]:
    """The same numbers in as few dimensions as the strides allow."""
    found: list[_Dim] = []
    for dim in dims:
        if dim.size == 1 and not dim.is_padded:
            continue
        if found and not dim.is_padded and _continues(found[-1], dim):
            far = found.pop()
            sizes = far.size * dim.size, far.before * dim.size, far.limit * dim.size
            found.append(_Dim(sizes[0], dim.source, dim.target, *sizes[1:]))
        else:
            found.append(dim)
    return found


def _continues(far: _Dim, near: _Dim) -> bool:
    return far.source == near.source * near.size and far.target == near.target * near.size


def _ordered(dims: list[_Dim]) -> list[_Dim]:
    """At least two; the last is the target's nearest, the one before it the source's."""
    dims = [_Dim(1, 0, 0, 0, 1)] * (2 - len(dims)) + dims
    *others, last = dims
    long = [dim for dim in dims if dim.size > 1]
    near = min(long, key=lambda dim: dim.source) if long else last
    if near is not last:
        others = [*(dim for dim in others if dim is not near), near]
    return [*others, last]


def _part(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x[(*[slice(None)] * dim, slice(start, stop, step))]


def _before(x: Tensor, pad: Sequence[int]) -> list[int]:
    """By dimension, from pairs that begin with the last one."""
    found = [0] * x.dim()
    for place, before in enumerate(pad[::2]):
        found[-1 - place] = before
    return found


# --- meaning --------------------------------------------------------------------------------------


def transpose_meaning(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """In plain torch, each of these: a new contiguous tensor."""
    return x.transpose(dim0, dim1).clone(memory_format=torch.contiguous_format)


def concat_meaning(tensors: Sequence[Tensor], dim: int) -> Tensor:
    # torch.cat would keep another order of dimensions where all tensors have that.
    return torch.cat(list(tensors), dim).contiguous()


def slice_meaning(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return _part(x, dim, start, stop, step).clone(memory_format=torch.contiguous_format)


def slice_backward_meaning(
    grad: Tensor, size: int, dim: int, start: int, stop: int, step: int
) -> Tensor:
    out = torch.zeros_like(_fake_slice_backward(grad, size, dim, start, stop, step))
    _part(out, dim, start, stop, step).copy_(grad)
    return out


def pad_meaning(x: Tensor, pad: Sequence[int], value: float) -> Tensor:
    padded = functional.pad(x, list(pad), value=value)
    return padded.clone(memory_format=torch.contiguous_format)


# --- registration ---------------------------------------------------------------------------------


def _fake_transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return x.new_empty(x.transpose(dim0, dim1).shape)


def _fake_concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(sizes)


def _fake_slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x.new_empty(_part(x, dim, start, stop, step).shape)


def _fake_slice_backward(
    grad: Tensor, size: int, dim: int, start: int, stop: int, step: int
) -> Tensor:
    sizes = list(grad.shape)
    sizes[dim] = size
    return grad.new_empty(sizes)


def _fake_pad(x: Tensor, pad: Sequence[int], value: float) -> Tensor:
    sizes = list(x.shape)
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        sizes[-1 - place] += before + after
    return x.new_empty(sizes)


_transpose = operator(
    "transpose_copy", launcher=_launch_transpose, meaning=transpose_meaning, fake=_fake_transpose
)
_concat = operator("concat", launcher=_launch_concat, meaning=concat_meaning, fake=_fake_concat)
_slice = operator("slice_copy", launcher=_launch_slice, meaning=slice_meaning, fake=_fake_slice)
_slice_backward = operator(
    "slice_backward",
    launcher=_launch_slice_backward,
    meaning=slice_backward_meaning,
    fake=_fake_slice_backward,
)
_pad = operator("pad_copy", launcher=_launch_pad, meaning=pad_meaning, fake=_fake_pad)


def _save_settings(ctx, inputs, output) -> None:
    x, *ctx.settings = inputs
    ctx.size = x.shape


def _save_sizes(ctx, inputs, output) -> None:
    tensors, ctx.dim = inputs
    ctx.sizes = [tensor.shape[ctx.dim] for tensor in tensors]


def _differentiate_transpose(ctx, grad):
    return _transpose(grad, *ctx.settings), None, None


def _differentiate_concat(ctx, grad):
    return list(grad.split(ctx.sizes, ctx.dim)), None


def _differentiate_slice(ctx, grad):
    dim, *range_ = ctx.settings
    return _slice_backward(grad, ctx.size[dim], dim, *range_), None, None, None, None


def _differentiate_slice_backward(ctx, grad):
    _, dim, *range_ = ctx.settings
    return _slice(grad, dim, *range_), None, None, None, None, None


def _differentiate_pad(ctx, grad):
    pad, _ = ctx.settings
    return _pad(grad, [-size for size in pad], 0.0), None, None


differentiable("transpose_copy", backward=_differentiate_transpose, saves=_save_settings)
differentiable("concat", backward=_differentiate_concat, saves=_save_sizes)
differentiable("slice_copy", backward=_differentiate_slice, saves=_save_settings)
differentiable("slice_backward", backward=_differentiate_slice_backward, saves=_save_settings)
differentiable("pad_copy", backward=_differentiate_pad, saves=_save_settings)


def transpose_copy(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """x.transpose(dim0, dim1) as a contiguous tensor of its own."""
    dims = _dim(x, "dim0", dim0), _dim(x, "dim1", dim1)
    x = _resolved(x)
    return (_transpose if kernels_take(x, dtypes=_MOVED) else transpose_meaning)(x, *dims)


def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one dtype, which differ in size along `dim` only, one after the other."""
    demand(len(tensors) > 0, "concat takes at least one tensor")
    first = tensors[0]
    dim = _dim(first, "dim", dim)
    for number, tensor in enumerate(tensors):
        fits = (
            tensor.dtype == first.dtype
            and tensor.dim() == first.dim()
            and tensor.shape[:dim] == first.shape[:dim]
            and tensor.shape[dim + 1 :] == first.shape[dim + 1 :]
        )
        demand(
            fits,
            f"tensor {number} is as the first ({described(first)}) but for dimension {dim}, "
            f"not {described(tensor)}",
        )
    given = [_resolved(tensor) for tensor in tensors]
    return (_concat if kernels_take(*given, dtypes=_MOVED) else concat_meaning)(given, dim)


def slice_copy(
    x: Tensor, dim: int, start: int | None = None, stop: int | None = None, step: int = 1
) -> Tensor:
    """x[start:stop:step] along `dim`, as a contiguous tensor of its own."""
    dim = _dim(x, "dim", dim)
    demand(step > 0, lambda: f"step is at least 1, not {step}")
    size = x.shape[dim]
    first = _within(start, size, 0)
    last = max(first, _within(stop, size, size))
    x = _resolved(x)
    compute = _slice if kernels_take(x, dtypes=_MOVED) else slice_meaning
    return compute(x, dim, first, last, step)


def pad_copy(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    """torch.nn.functional.pad(x, pad, value=value): pairs (before, after), the last dimension's
    first; negative sizes crop."""
    demand(
        len(pad) % 2 == 0 and len(pad) // 2 <= x.dim(),
        f"pad is at most {x.dim()} pairs of sizes, not {list(pad)}",
    )
    for place in range(len(pad) // 2):
        size = x.shape[-1 - place]
        left = size + min(pad[2 * place], 0) + min(pad[2 * place + 1], 0)
        demand(left >= 0, f"pad crops at most the {size} numbers that there are, not {list(pad)}")
    x = _resolved(x)
    compute = _pad if kernels_take(x, dtypes=_MOVED) else pad_meaning
    return compute(x, list(pad), float(value))


def _within(place: int | None, size: int, default: int) -> int:
    if place is None:
        return default
    return max(0, min(size, place + size if place < 0 else place))


def _resolved(x: Tensor) -> Tensor:
    """With conjugation and sign in the bits."""
    return x.resolve_conj().resolve_neg()


def _dim(x: Tensor, name: str, dim: int) -> int:
    choice = f"{name} is one of the {x.dim()} dimensions of x"
    demand(-x.dim() <= dim < x.dim(), lambda: f"{choice}, not {dim}")
    return dim % x.dim()
