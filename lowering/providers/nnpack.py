"""NNPACK: convolutions of one image by transforms, which need fewer products than the direct way.

Torch hands NNPACK the weight in every call, so nothing is packed here but what a BatchNorm behind
the convolution changes in it. With several images, or with strides, torch takes other routes
through NNPACK; they are slow, and left alone.

NNPACK has threads of its own beside OpenMP's, and both keep cores busy while they wait: with more
than one thread what the transforms save is lost again (measured: 2 threads on 2 cores that others
used as well, 3 layers of 5x5 in 128 ms instead of 68), so it is used with one thread only.

3x3 goes through Winograd's transform, whose error is some 1e-5; all others through Fourier's, whose
error is eager's own or less. Both smear an infinity or a NaN over a whole tile of the output.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import fx

from lowering import observing, outputs
from lowering.contract import Probe, Provider, RegionMaker
from lowering.graphs import hint
from lowering.packing import PackedWeights
from lowering.providers.mkldnn import fold_norm
from lowering.regions.convolution import Convolution
from lowering.regions.epilogue import Epilogue

_LARGEST_KERNEL = 16
_LEAST_GAIN = 1.5
# What transforms cost, in FLOPs that the direct way would do in the same time: per FLOP of the
# products between them, per element of a transformed kernel, per element of a transformed image
# (fitted to 20 convolutions on one thread of Zen 4).
_PER_PRODUCT, _PER_KERNEL_ELEMENT, _PER_IMAGE_ELEMENT = 1.4, 30, 75

weights = PackedWeights()
# NNPACK makes its threads in its first call, as many as torch had then, and keeps them: (process,
# threads). They do not survive a fork and know nothing of a thread count that was set since.
_pool: tuple[int, int] | None = None


def probe() -> Probe:
    global _pool
    if not torch.backends.nnpack.is_available():  # this also initialises it
        return Probe.no("this torch was built without NNPACK, or the CPU lacks what it needs")
    if _pool is not None:
        alive = _pool[0] == os.getpid()
        return Probe.yes() if alive else Probe.no("NNPACK's threads do not survive a fork")
    image, kernel = torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3)
    try:
        with torch.no_grad():
            out = _call(image, kernel, None, [0, 0])
    except RuntimeError as error:
        return Probe.no(f"NNPACK does not work here: {error}")
    if not torch.allclose(out, torch.full_like(out, 9.0), rtol=1e-4):
        return Probe.no("NNPACK computes wrong values here")
    _pool = _now()
    return Probe.yes()


def _now() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def _call(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: list[int]
) -> torch.Tensor:
    return torch.ops.aten._nnpack_spatial_convolution.default(input, weight, bias, padding)


_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "nnpack_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor?[] norm, float eps, "
    "SymInt[] padding) -> Tensor"
)


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[torch.Tensor | None],
    eps: float,
    padding: list[int],
) -> torch.Tensor:
    if norm:
        weight, bias = _folded(weight, bias, norm, eps)
    if _pool != _now() or not input.numel() or not weight.numel() or not _finite(input, weight):
        observing.region_ran("convolution", "eager")
        return torch.nn.functional.conv2d(input, weight, bias, padding=padding).contiguous(
            memory_format=outputs.order_of(input)
        )
    observing.region_ran("convolution", "nnpack")
    return _call(input, weight, bias, padding).contiguous(memory_format=outputs.order_of(input))


def _finite(*tensors: torch.Tensor) -> bool:
    """A sum that overflows only sends finite numbers the direct way."""
    return all(math.isfinite(tensor.sum().item()) for tensor in tensors)


def _folded(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[torch.Tensor | None],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    parts = tuple(t for t in (weight, bias, *norm) if t is not None)
    return weights.get(
        parts, (eps, bias is None), lambda: fold_norm(weight, bias, norm, eps, weight.dtype)
    )


def _convolution_meta(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[torch.Tensor | None],
    eps: float,
    padding: list[int],
) -> torch.Tensor:
    height, width = (
        size + 2 * p - kernel + 1
        for size, kernel, p in zip(input.shape[2:], weight.shape[2:], padding, strict=True)
    )
    shape = (input.shape[0], weight.shape[0], height, width)
    return torch.empty(
        shape, dtype=input.dtype, device=input.device, memory_format=outputs.order_of(input)
    )


_library.impl("nnpack_convolution", _convolution, "CPU")
torch.library.register_fake("kernel_dispatch::nnpack_convolution", _convolution_meta, lib=_library)


def _emit(graph: fx.Graph, match: Convolution, epilogue: Epilogue) -> fx.Node:
    norm = match.norm
    parts = [norm.weight, norm.bias, norm.mean, norm.var] if norm is not None else []
    eps = norm.eps if norm is not None else 0.0
    return graph.call_function(
        torch.ops.kernel_dispatch.nnpack_convolution.default,
        (match.input, match.weight, match.bias, parts, eps, match.padding),
    )


def _refuses(match: Convolution) -> str:
    if _pool is None or _now() != _pool or _pool[1] != 1:
        return "nnpack's threads and OpenMP's get in each other's way: it is used with one thread"
    weight, images = match.weight.meta["val"], match.input.meta["val"].shape[0]
    if weight.dim() != 4:
        return "nnpack takes 2-D convolutions only"
    if match.groups != 1 or {*match.dilation, *match.stride} != {1}:
        return "nnpack is used without groups, dilation and stride"
    if max(weight.shape[2:]) > _LARGEST_KERNEL:
        return f"nnpack takes kernels up to {_LARGEST_KERNEL}x{_LARGEST_KERNEL}"
    if any(p >= side for p, side in zip(match.padding, weight.shape[2:], strict=True)):
        return "nnpack takes less padding than the kernel is wide"
    if not isinstance(images, int) or images != 1:
        return "nnpack is used for single images"
    parts = [match.weight, *([] if match.bias is None else [match.bias])]
    if any(part.meta["val"].dtype != match.dtype for part in parts):
        return "nnpack takes weights in the dtype that is computed in"
    height, width = (hint(size) for size in match.node.meta["val"].shape[2:])
    outputs, inputs, *kernel = weight.shape
    if gain(inputs, outputs, (height, width), kernel) < _LEAST_GAIN:
        return "nnpack's transforms would cost more than they save"
    return ""


def gain(inputs: int, outputs: int, image: Sequence[int], kernel: Sequence[int]) -> float:
    """How many times faster than the direct way: an estimate."""
    small, large = (_tiles(image, kernel, side) for side in (8, 16))
    winograd = list(kernel) == [3, 3]
    fits_small = winograd or (max(kernel) <= 8 and small <= 4 * large)  # NNPACK's own choice
    side, tiles = (8, small) if fits_small else (16, large)
    flops = 2 if winograd else 4  # Fourier's products are of complex numbers
    cost = side**2 * (
        _PER_PRODUCT * flops * tiles * inputs * outputs
        + _PER_KERNEL_ELEMENT * inputs * outputs
        + _PER_IMAGE_ELEMENT * tiles * (inputs + outputs)
    )
    direct = 2 * math.prod(image) * math.prod(kernel) * inputs * outputs
    return direct / cost if cost else 0.0


def _tiles(image: Sequence[int], kernel: Sequence[int], side: int) -> int:
    """How many tiles of this side cover the image; the kernel's width is lost in each."""
    fits = (max(side - width + 1, 1) for width in kernel)
    return math.prod(-(-size // fit) for size, fit in zip(image, fits, strict=True))


PROVIDER = Provider(
    name="nnpack",
    summary="NNPACK: 2-D convolutions of single images by transforms, in inference",
    probe=probe,
    regions={"convolution": RegionMaker(_emit, refuses=_refuses, packed_element=lambda match: 0)},
)
