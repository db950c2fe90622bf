"""Interpolation, sampling at a grid and padding as operators that stay whole: torch computes them.

Inductor generates them number by number: on one thread, reflected padding takes 5 times as long as
torch's own kernel, sampling at a grid 5 to 9 times, bilinear interpolation twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowering import observing, outputs

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
# Inductor may hand over memory as it lies: torch's kernels take images in either order.
_TAGS = (torch.Tag.flexible_layout,)
_SAMPLED = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_OUTSIDE = {"zeros": 0, "border": 1, "reflection": 2}
_INTERPOLATION_BACKWARD = {
    "linear": aten.upsample_linear1d_backward.default,
    "bilinear": aten.upsample_bilinear2d_backward.default,
    "bicubic": aten.upsample_bicubic2d_backward.default,
    "trilinear": aten.upsample_trilinear3d_backward.default,
}
_PADDING_BACKWARD = {
    ("reflect", 1): aten.reflection_pad1d_backward.default,
    ("reflect", 2): aten.reflection_pad2d_backward.default,
    ("reflect", 3): aten.reflection_pad3d_backward.default,
    ("replicate", 1): aten.replication_pad1d_backward.default,
    ("replicate", 2): aten.replication_pad2d_backward.default,
    ("replicate", 3): aten.replication_pad3d_backward.default,
}


def _as_laid(x: Tensor, result: Tensor) -> Tensor:
    """In the order of `x`. Torch's kernels do so already, mostly; compiled code relies on it."""
    return result.contiguous(memory_format=outputs.order_of(x))


def _as_torch_reads(x: Tensor) -> Tensor:
    """Of an image alone in its batch Inductor may name any stride for that dimension. Torch takes
    one channels last for one in rows then, and copies it there and back."""
    if outputs.order_of(x) is torch.contiguous_format:
        return x
    _, channels, height, width = x.shape
    image = channels * height * width
    return x.as_strided(x.shape, (image, 1, width * channels, channels))


def _interpolate(
    x: Tensor, size: Sequence[int] | None, scales: Sequence[float] | None, mode: str, corners: bool
) -> Tensor:
    size, scales = size and list(size), scales and list(scales)
    aligned = None if mode.startswith("nearest") else corners
    image = _as_torch_reads(x)
    return _as_laid(x, functional.interpolate(image, size, scales, mode, aligned))


def _interpolate_backward(
    grad: Tensor,
    sizes: Sequence[int],
    scales: Sequence[float] | None,
    mode: str,
    corners: bool,
) -> Tensor:
    each = [None] * (len(sizes) - 2) if scales is None else scales
    backward = _INTERPOLATION_BACKWARD[mode]
    dx = backward(_as_torch_reads(grad), grad.shape[2:], sizes, corners, *each)
    return _as_laid(grad, dx)


def _grid_sample(x: Tensor, grid: Tensor, mode: str, padding: str, corners: bool) -> Tensor:
    ways = (_SAMPLED[mode], _OUTSIDE[padding], corners)
    return aten.grid_sampler_2d.default(x, grid, *ways).contiguous()


def _grid_sample_backward(
    grad: Tensor, x: Tensor, grid: Tensor, mode: str, padding: str, corners: bool, mask: list[bool]
) -> tuple[Tensor, Tensor]:
    ways = (_SAMPLED[mode], _OUTSIDE[padding], corners)
    dx, dgrid = aten.grid_sampler_2d_backward.default(grad, x, grid, *ways, mask)
    return x.new_empty(0) if dx is None else dx.contiguous(), dgrid.contiguous()


def _pad(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    if mode == "circular":
        return _wrap(x, pad)
    return _as_laid(x, functional.pad(_as_torch_reads(x), list(pad), mode))


def _pad_backward(grad: Tensor, x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    if mode == "circular":
        return _as_laid(x, _unwrap(grad, x.shape, pad))
    backward = _PADDING_BACKWARD[mode, len(pad) // 2]
    return _as_laid(x, backward(_as_torch_reads(grad), _as_torch_reads(x), pad))


def _around(sizes: Sequence[int], pad: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Each dimension that is padded, the last one first: which one, its size, before and after."""
    for place in range(len(pad) // 2):
        dim = len(sizes) - 1 - place
        yield dim, sizes[dim], pad[2 * place], pad[2 * place + 1]


def _wrap(x: Tensor, pad: Sequence[int]) -> Tensor:
    """In the order of `x`, where torch goes to rows: ours may leave an image channels last."""
    sides, sizes = list(_around(x.shape, pad)), list(x.shape)
    for dim, size, before, after in sides:
        sizes[dim] = size + before + after
    out = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=outputs.order_of(x))
    inside = out
    for dim, size, before, _ in sides:
        inside = inside.narrow(dim, before, size)
    inside.copy_(x)
    for done, (dim, size, before, after) in enumerate(sides):
        whole = out  # what earlier dimensions were padded with is wrapped as well
        for other, length, start, _ in sides[done + 1 :]:
            whole = whole.narrow(other, start, length)
        whole.narrow(dim, 0, before).copy_(whole.narrow(dim, size, before))
        whole.narrow(dim, before + size, after).copy_(whole.narrow(dim, before, after))
    return out


def _unwrap(grad: Tensor, sizes: Sequence[int], pad: Sequence[int]) -> Tensor:
    """What was copied from the other side is added there."""
    for dim, size, before, after in reversed(list(_around(sizes, pad))):
        inside = grad.narrow(dim, before, size).clone()
        inside.narrow(dim, size - before, before).add_(grad.narrow(dim, 0, before))
        inside.narrow(dim, 0, after).add_(grad.narrow(dim, before + size, after))
        grad = inside
    return grad


def _like_image(grad: Tensor, sizes: Sequence[int], *rest: Any) -> Tensor:
    return _as_laid(grad, grad.new_empty(sizes))


def _like_both(grad: Tensor, x: Tensor, grid: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if rest[-1][0] else 0)
    return dx, grid.new_empty(grid.shape)


def _like_padded(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return _as_laid(x, x.new_empty(x.shape))


_IMAGE = "Tensor x, SymInt[]? size, float[]? scales, str mode, bool corners"
_SAMPLES = "Tensor x, Tensor grid, str mode, str padding, bool corners"
_SIZES = "Tensor grad, SymInt[] sizes, float[]? scales, str mode, bool corners"
# Forward: the same function says what the result looks like. Backward: torch has no way to tell
# where sizes are symbols.
_FORWARD: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    (f"interpolate({_IMAGE}) -> Tensor", _interpolate),
    (f"grid_sample({_SAMPLES}) -> Tensor", _grid_sample),
    ("pad(Tensor x, SymInt[] pad, str mode) -> Tensor", _pad),
)
_BACKWARD: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (f"interpolate_backward({_SIZES}) -> Tensor", _interpolate_backward, _like_image),
    (
        f"grid_sample_backward(Tensor grad, {_SAMPLES}, bool[] mask) -> (Tensor, Tensor)",
        _grid_sample_backward,
        _like_both,
    ),
    (
        "pad_backward(Tensor grad, Tensor x, SymInt[] pad, str mode) -> Tensor",
        _pad_backward,
        _like_padded,
    ),
)


def _counted(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        observing.region_ran("resampling", "eager")
        return compute(*args)

    return run


def _register(schema: str, compute: Callable[..., Any], like: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_dispatch::{name}", like, lib=_library)


for _schema, _compute in _FORWARD:
    _register(_schema, _counted(_compute), _compute)
for _schema, _compute, _like in _BACKWARD:
    _register(_schema, _compute, _like)

ours = torch.ops.kernel_dispatch


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.rest = inputs[len(tensors) :]


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.sizes, ctx.rest = inputs[0].shape, inputs[2:]


def _through_interpolation(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ours.interpolate_backward(grad, ctx.sizes, *ctx.rest), None, None, None, None


def _through_grid_sample(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, grid = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    dx, dgrid = ours.grid_sample_backward(grad, x, grid, *ctx.rest, wanted)
    return dx if wanted[0] else None, dgrid if wanted[1] else None, None, None, None


def _through_padding(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return ours.pad_backward(grad, x, *ctx.rest), None, None


for _name, _through, _setup in (
    ("interpolate", _through_interpolation, _keep_sizes),
    ("grid_sample", _through_grid_sample, _keep),
    ("pad", _through_padding, _keep),
):
    torch.library.register_autograd(
        f"kernel_dispatch::{_name}", _through, setup_context=_setup, lib=_library
    )
