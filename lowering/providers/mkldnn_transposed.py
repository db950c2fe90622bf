"""oneDNN's transposed convolutions: packed weights, what follows them in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering import machine, observing
from lowering.contract import RegionMaker
from lowering.native.shapes import transposed_sizes
from lowering.norm_folding import factor_and_shift
from lowering.packing import PackedWeights
from lowering.providers import half_precision, post_ops
from lowering.regions.convolution import LONGEST_CHAIN
from lowering.regions.epilogue import Epilogue
from lowering.regions.transposed_convolution import TransposedConvolution

Tensor = torch.Tensor

weights = PackedWeights()
_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "mkldnn_transposed_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor?[] norm, "
    "float eps, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, "
    "int groups, str activation, float a, float b) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),  # Inductor is to write images as the graph says
)


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Sequence[Tensor | None],
    eps: float,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    a: float,
    b: float,
) -> Tensor:
    dtype = input.dtype
    if half_precision.is_widened(dtype):
        rest = (norm, eps, stride, padding, output_padding, dilation, groups, activation, a, b)
        return _transposed_convolution(input.float(), weight, bias, *rest).to(dtype)
    if not input.numel():  # oneDNN has no empty images
        observing.region_ran("transposed_convolution", "eager")
        plain = (input, weight.to(dtype), None, stride, padding, dilation, True, output_padding)
        out = torch.convolution(*plain, groups)  # empty as well, or eager's own error
        return out.contiguous(memory_format=channels_last(out))
    geometry = (padding, output_padding, stride, dilation, groups)
    parts = tuple(t for t in (weight, bias, *norm) if t is not None)

    def pack() -> tuple[Tensor, Tensor | None]:
        folded, shift = _folded(weight, bias, norm, eps, groups)
        reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight
        packed = reorder(folded.to(dtype).contiguous(), *geometry, list(input.shape))
        return packed, None if shift is None else shift.to(dtype)

    packed, shift = weights.get(parts, (dtype, eps, groups, bias is None), pack)
    observing.region_ran("transposed_convolution", "mkldnn")
    image = input.contiguous(memory_format=channels_last(input))
    together = groups == 1 and image.dim() == 4 and _takes_activations(weight, stride)
    name, numbers, algorithm = post_ops.of(activation if together else "none", a, b)
    result: Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(
        image, packed, shift, *geometry, name, numbers, algorithm
    )
    return result if together else post_ops.activated(result, activation, a, b)


def _takes_activations(weight: Tensor, stride: Sequence[int]) -> bool:
    """With one behind it oneDNN takes ten times as long for groups and volumes, and with AVX2 alone
    for images whose pixels have different numbers of taps."""
    return not machine.cpu().ends_at_avx2 or _even(weight.shape[2:], stride)


def _even(kernel: Sequence[int], stride: Sequence[int]) -> bool:
    return all(taps % step == 0 for taps, step in zip(kernel, stride, strict=True))


def channels_last(image: Tensor) -> torch.memory_format:
    return torch.channels_last if image.dim() == 4 else torch.channels_last_3d


def _folded(
    weight: Tensor, bias: Tensor | None, norm: Sequence[Tensor | None], eps: float, groups: int
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the convolution that does the work of a BatchNorm behind it as well."""
    plain = weight.detach()
    if not norm:
        return plain, None if bias is None else bias.detach()
    factor, shift = factor_and_shift(bias, norm, eps)
    # Outputs are the second dimension, and inputs the first: of all groups.
    inputs, outputs, *kernel = plain.shape
    by_group = plain.double().reshape(groups, inputs // groups, outputs, *kernel)
    scaled = by_group * factor.reshape(groups, 1, outputs, *[1] * len(kernel))
    return scaled.reshape(plain.shape), shift


def _meta(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Sequence[Tensor | None],
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *_: object,
) -> Tensor:
    geometry = (stride, padding, output_padding, dilation)
    spatial = transposed_sizes(input.shape[2:], weight.shape[2:], *geometry)
    out = input.new_empty((input.shape[0], *spatial, weight.shape[1] * groups))
    return out.movedim(-1, 1)


_library.impl("mkldnn_transposed_convolution", _transposed_convolution, "CPU")
torch.library.register_fake("kernel_dispatch::mkldnn_transposed_convolution", _meta, lib=_library)


def _emit(graph: fx.Graph, match: TransposedConvolution, epilogue: Epilogue) -> fx.Node:
    act, norm = epilogue.activation, match.norm
    parts: list[Any] = [] if norm is None else [norm.weight, norm.bias, norm.mean, norm.var]
    return graph.call_function(
        torch.ops.kernel_dispatch.mkldnn_transposed_convolution.default,
        (
            match.input,
            match.weight,
            match.bias,
            parts,
            0.0 if norm is None else norm.eps,
            match.stride,
            match.padding,
            match.output_padding,
            match.dilation,
            match.groups,
            act.name,
            float(act.a),
            float(act.b),
        ),
    )


def _refuses(match: TransposedConvolution) -> str:
    """oneDNN has no empty images, and no lines."""
    if match.weight.meta["val"].dim() not in (4, 5):
        return "mkldnn takes transposed convolutions of images and volumes only"
    sizes = (*match.input.meta["val"].shape, *match.weight.meta["val"].shape)
    if any(size == 0 for size in sizes if isinstance(size, int)):
        return "it is empty"
    inexact = match.dtype == torch.float32 and match.products > LONGEST_CHAIN // 2
    if inexact and (match.torch_unfolds or all(step == 1 for step in match.stride)):
        return f"mkldnn adds up {match.products} products in one chain, and torch in parts"
    return ""


def _declines(match: TransposedConvolution) -> str:
    """Groups gain nothing that would outweigh taking images to channels last and back. With AVX2
    alone hardly anything does, and uneven kernels took twice eager's time between others, too."""
    kernel = match.weight.meta["val"].shape[2:]
    if len(kernel) != 2 or half_precision.is_widened(match.dtype):
        return ""
    narrow = machine.cpu().ends_at_avx2
    if narrow and not _even(kernel, match.stride):
        return "with AVX2 alone torch's own is faster where the stride does not divide the kernel"
    gains_nothing = (narrow or match.groups > 1) and match.stands_alone
    return "torch's own between images in rows is as fast" if gains_nothing else ""


REGION = RegionMaker(
    _emit, post_ops.ABILITIES, _refuses, _declines, packed_element=half_precision.element
)
