"""oneDNN's layers between bytes: packed weights, what follows them in the same pass.

Sums are exact, in 32 bits; they are scaled as floats and rounded once. oneDNN takes weights whose
zero is 0 only. Whether it is shows when they are packed; others are computed in floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from lowering import direct_calls, observing
from lowering.contract import RegionMaker
from lowering.native.shapes import convolved
from lowering.packing import PackedWeights, Place, out_in
from lowering.providers import post_ops
from lowering.regions.epilogue import Epilogue
from lowering.regions.quantized import BYTES, QuantizedLayer

Tensor = torch.Tensor

weights = PackedWeights()
_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
# `steps` and `zeros`: of the weight (where one step holds for all), the input, the result, `other`.
_NUMBERS = "float[] steps, int[] zeros, ScalarType dtype, str activation, float a, float b"
_library.define(
    "mkldnn_quantized_convolution(Tensor input, Tensor weight, Tensor? step, Tensor? zero, "
    f"Tensor? bias, Tensor? other, {_NUMBERS}, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, int groups) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),  # Inductor is to write images as the graph says
)
_library.define(
    "mkldnn_quantized_linear(Tensor input, Tensor weight, Tensor? step, Tensor? zero, "
    f"Tensor? bias, Tensor? other, Tensor? input_step, Tensor? input_zero, {_NUMBERS}, "
    "bool in_out) -> Tensor"
)
_LAST = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions of an image


# --- convolution ----------------------------------------------------------------------------------


def _one_convolution(
    steps: Sequence[float],
    zeros: Sequence[int],
    dtype: torch.dtype,
    activation: str,
    a: float,
    b: float,
    *geometry: Any,
) -> Callable[..., Tensor]:
    """What one call in a graph computes."""
    place, ops = Place(weights), torch.ops.onednn
    stride, padding, dilation, groups = geometry
    name, numbers, algorithm = post_ops.of(activation, a, b)
    behind = (name, numbers, algorithm)
    (weight_step, in_step, out_step, other_step), (_, in_zero, out_zero, other_zero) = steps, zeros
    lost = functools.lru_cache(64)(functools.partial(_loses_its_way, geometry))

    def convolution(
        input: Tensor,
        weight: Tensor,
        step: Tensor | None,
        zero: Tensor | None,
        bias: Tensor | None,
        other: Tensor | None,
    ) -> Tensor:
        image, image_zero = _unsigned(input, in_zero)
        at = (in_step, image_zero, stride, padding, dilation, groups)

        def pack() -> Any:
            its_step, its_zero = _steps(step, weight_step), _zeros(weight)
            packed = ops.qconv_prepack(weight.detach(), its_step, *at, list(image.shape))
            return packed, its_step, its_zero

        packed = None
        if input.numel() and not lost(image.shape[2:], weight.shape[2:]):
            packed = _packed(place, weight, step, zero, (weight_step, *at), pack)
        if packed is None:
            observing.region_ran("quantized_convolution", "eager")
            run = getattr(functional, f"conv{weight.dim() - 2}d")
            compute = functools.partial(run, stride=stride, padding=padding, dilation=dilation)
            compute = functools.partial(compute, groups=groups)
            given = _Given(input, weight, step, zero, bias, other)
            return _channels_last(_plainly(compute, given, steps, zeros, dtype, (activation, a, b)))
        observing.region_ran("quantized_convolution", "mkldnn")
        bias = bias if bias is None else bias.float().contiguous()
        layer = (image, in_step, image_zero, *packed)
        to = (bias, stride, padding, dilation, groups, out_step, out_zero, dtype)
        if other is None:
            result: Tensor = ops.qconv_pointwise.default(*layer, *to, *behind)
            return result
        onto = other.clone(memory_format=torch.channels_last)
        added = (other_step, other_zero, "sum", 1.0, *behind)
        result = ops.qconv2d_pointwise.binary(*layer, onto, *to, *added)
        return result  # noqa: RET504  (typed)

    return convolution


def _loses_its_way(geometry: Sequence[Any], sizes: Sequence[int], kernel: Sequence[int]) -> bool:
    """oneDNN gives anything, or ends the process, where a stride leads to a single output, some
    output has no tap within the image, or the kernel is larger than a volume (3.12, found by trying
    thousands of geometries)."""
    for size, taps, stride, padding, dilation in zip(sizes, kernel, *geometry[:3], strict=True):
        outputs = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        starts = range(-padding, outputs * stride - padding, stride)
        within = (
            any(0 <= start + tap * dilation < size for tap in range(taps)) for start in starts
        )
        larger = len(sizes) == 3 and dilation * (taps - 1) >= size
        if larger or (outputs == 1 and stride > 1) or not all(within):
            return True
    return False


def _unsigned(image: Tensor, zero: int) -> tuple[Tensor, int]:
    """oneDNN's convolutions in torch read unsigned bytes: the same numbers, 128 further up."""
    if image.dtype is torch.uint8:
        return image, zero
    return torch.bitwise_xor(image, -128).view(torch.uint8), zero + 128


def _channels_last(image: Tensor) -> Tensor:
    return image.movedim(1, -1).contiguous().movedim(-1, 1)


def _convolution(*given: Any) -> Tensor:
    tensors, (steps, zeros, dtype, activation, a, b, *spatial, groups) = given[:6], given[6:]
    made = _every_convolution(
        (*steps,), (*zeros,), dtype, activation, a, b, *map(tuple, spatial), groups
    )
    return made(*tensors)


_every_convolution = functools.cache(_one_convolution)


def _convolution_meta(input: Tensor, weight: Tensor, *given: Any) -> Tensor:
    dtype, *_, stride, padding, dilation, _ = given[6:]
    return convolved(input, weight, (stride, padding, dilation), dtype)


# --- linear ---------------------------------------------------------------------------------------


def _one_linear(
    steps: Sequence[float],
    zeros: Sequence[int],
    dtype: torch.dtype,
    activation: str,
    a: float,
    b: float,
    in_out: bool,
) -> Callable[..., Tensor]:
    """What one call in a graph computes."""
    place, ops = Place(weights), torch.ops.onednn
    name, numbers, algorithm = post_ops.of(activation, a, b)
    behind = (name, numbers, algorithm)
    (weight_step, in_step, out_step, other_step), (_, in_zero, out_zero, other_zero) = steps, zeros
    to = (out_step, out_zero, dtype)

    def linear(
        input: Tensor,
        weight: Tensor,
        step: Tensor | None,
        zero: Tensor | None,
        bias: Tensor | None,
        other: Tensor | None,
        input_step: Tensor | None,
        input_zero: Tensor | None,
    ) -> Tensor:
        def pack() -> Any:
            plain = out_in(weight.detach(), in_out).contiguous()
            packed = ops.qlinear_prepack(plain, None)
            return packed, _steps(step, weight_step), _zeros(plain)

        packed = _packed(place, weight, step, zero, ("linear", weight_step, in_out), pack)
        if packed is None or not input.numel():
            observing.region_ran("quantized_linear", "eager")
            matrix = out_in(weight, in_out)
            given = _Given(input, matrix, step, zero, bias, other, input_step, input_zero)
            compute = functional.linear
            return _plainly(compute, given, steps, zeros, dtype, (activation, a, b)).contiguous()
        observing.region_ran("quantized_linear", "mkldnn")
        layer = (input.contiguous(), in_step, in_zero, *packed)
        way = "default" if other is None else "binary"
        if input_step is not None:
            layer = (layer[0], input_step, input_zero, *packed)
            way = "tensor" if other is None else "binary_tensor"
        run = getattr(ops.qlinear_pointwise, way)
        bias = bias if bias is None else bias.float().contiguous()
        if other is None:
            result: Tensor = run(*layer, bias, *to, *behind)
            return result
        # Floats are read; onto bytes it is added where they lie.
        kind = "sum" if other.dtype in BYTES else "add"
        rows = other.contiguous()
        rows = rows.clone() if kind == "sum" and rows is other else rows
        result = run(*layer, rows, bias, *to, other_step, other_zero, kind, 1.0, *behind)
        return result  # noqa: RET504  (typed)

    return linear


_every_linear = functools.cache(_one_linear)


def _linear(*given: Any) -> Tensor:
    tensors, (steps, zeros, *rest) = given[:8], given[8:]
    return _every_linear((*steps,), (*zeros,), *rest)(*tensors)


def _linear_meta(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    dtype, in_out = rest[8], rest[-1]
    return input.new_empty((*input.shape[:-1], weight.shape[1 if in_out else 0]), dtype=dtype)


# --- both -----------------------------------------------------------------------------------------


def _packed(
    place: Place,
    weight: Tensor,
    step: Tensor | None,
    zero: Tensor | None,
    recipe: Any,
    pack: Callable[[], Any],
) -> Any:
    """None: the weight's zero is not 0."""

    def make() -> Any:
        return None if zero is not None and bool(zero.any()) else pack()

    parts = tuple([one for one in (weight, step, zero) if one is not None])
    return place.get(parts, recipe, make)


def _steps(step: Tensor | None, for_all: float) -> Tensor:
    return torch.tensor([for_all]) if step is None else step.detach().float().contiguous()


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[0], dtype=torch.int32)


class _Given(NamedTuple):
    """The tensors of a call."""

    input: Tensor
    weight: Tensor
    step: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    other: Tensor | None
    input_step: Tensor | None = None
    input_zero: Tensor | None = None


def _plainly(
    compute: Callable[..., Tensor],
    given: _Given,
    steps: Sequence[float],
    zeros: Sequence[int],
    dtype: torch.dtype,
    activation: tuple[str, float, float],
) -> Tensor:
    """What the model says, in double precision: of those geometries, oneDNN's convolutions of
    floats end the process, too."""
    weight, bias, other = given.weight, given.bias, given.other
    found = given.input_step is not None
    x = _read(given.input, *(given[6:] if found else (steps[1], zeros[1])))
    by_output = (-1, *[1] * (weight.dim() - 1))
    step = steps[0] if given.step is None else given.step.reshape(by_output)
    zero = 0 if given.zero is None else given.zero.reshape(by_output)
    out = compute(x, _read(weight, step, zero), None if bias is None else bias.double())
    if other is not None:
        out = out + (_read(other, steps[3], zeros[3]) if other.dtype in BYTES else other)
    out = post_ops.activated(out, *activation)
    if dtype not in BYTES:
        return out.to(dtype)
    limits = torch.iinfo(dtype)
    return (out / steps[2]).round().add(zeros[2]).clamp(limits.min, limits.max).to(dtype)


def _read(numbers: Tensor, step: Any, zero: Any) -> Tensor:
    return (numbers.double() - zero) * step


def _emit_convolution(graph: fx.Graph, match: QuantizedLayer, epilogue: Epilogue) -> fx.Node:
    epilogue.steps.extend(match.steps)
    target = torch.ops.kernel_dispatch.mkldnn_quantized_convolution.default
    return graph.call_function(target, (*match.tensors(), *_numbers(match), *match.geometry))


def _emit_linear(graph: fx.Graph, match: QuantizedLayer, epilogue: Epilogue) -> fx.Node:
    epilogue.steps.extend(match.steps)
    target = torch.ops.kernel_dispatch.mkldnn_quantized_linear.default
    arguments = (*match.tensors(), *match.found_grid(), *_numbers(match), match.in_out)
    return graph.call_function(target, arguments)


def _numbers(match: QuantizedLayer) -> tuple[Any, ...]:
    act = match.activation
    return *match.grids(), match.dtype, act.name, float(act.a), float(act.b)


def _refuses_convolution(match: QuantizedLayer) -> str:
    if not hasattr(torch.ops.onednn, "qconv_pointwise"):
        return "this torch has no onednn::qconv_pointwise"
    signed = torch.int8 in (match.dtype, match.other_grid.dtype)
    return _NO_SIGN if signed and not _has_signed_results() else ""


def _refuses_linear(match: QuantizedLayer) -> str:
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "this torch has no onednn::qlinear_pointwise"
    signed = torch.int8 in (match.dtype, match.grid.dtype, match.other_grid.dtype)
    return _NO_SIGN if signed and not _has_signed_results() else ""


_NO_SIGN = "bytes with a sign are not oneDNN's in this torch"


@functools.cache
def _has_signed_results() -> bool:
    """Asked for bytes with a sign, torch 2.8 gives others without a word."""
    ops = torch.ops.onednn
    with _disable_current_modes(), torch.no_grad():
        one = torch.ones(1)
        try:
            packed = ops.qlinear_prepack(torch.full((1, 4), 2, dtype=torch.int8), None)
            row = torch.full((1, 4), -3, dtype=torch.int8)
            layer = (row, 1.0, 0, packed, one, torch.zeros(1, dtype=torch.int32), None)
            got = ops.qlinear_pointwise.default(*layer, 1.0, 0, torch.int8, "none", [], "")
        except RuntimeError:
            return False
    return bool(got.dtype is torch.int8 and got.item() == -24)


for name, compute, meta, varying, bind in (
    ("mkldnn_quantized_convolution", _convolution, _convolution_meta, 6, _one_convolution),
    ("mkldnn_quantized_linear", _linear, _linear_meta, 8, _one_linear),
):
    _library.impl(name, compute, "CPU")
    torch.library.register_fake(f"kernel_dispatch::{name}", meta, lib=_library)
    direct_calls.offer(getattr(torch.ops.kernel_dispatch, name).default, varying, bind)

CONVOLUTION = RegionMaker(
    _emit_convolution, refuses=_refuses_convolution, packed_element=lambda match: 1
)
LINEAR = RegionMaker(_emit_linear, refuses=_refuses_linear, packed_element=lambda match: 1)
