"""Who is measured: one small function per provider that makes a problem ready to be computed.

A candidate is asked with a `Gemm` or a `Conv` that all candidates of its group share, and gives
back a function without arguments, or None where it cannot compute such a problem. What it raises
is noted as the reason why it was left out. New providers add themselves with `register`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from lowering import toolchain
from lowering.convolution_steps import Way
from lowering.native import library
from lowering.profile import EAGER, SHAPES, RateKey
from lowering.providers import half_precision, ipex


@dataclass(frozen=True)
class Gemm:
    """A linear layer: x [rows, inputs], weight [outputs, inputs]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    threads: int

    @property
    def flops(self) -> int:
        return 2 * self.x.shape[0] * self.weight.numel()


@dataclass(frozen=True)
class Conv:
    """A convolution of stride 1 that keeps height and width."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    padding: tuple[int, int]
    groups: int
    threads: int

    @property
    def flops(self) -> int:
        return 2 * self.x[:, 0].numel() * self.weight.numel()


Run = Callable[[], Any]
Prepare = Callable[[Any], "Run | None"]
CANDIDATES: dict[RateKey, Prepare] = {}
_versions: dict[RateKey, Callable[[], str]] = {}
_ready: dict[Callable[[Path], object], None] = {}  # an ordered set


def register(
    kind: str,
    provider: str,
    dtypes: Iterable[str],
    prepare: Prepare,
    shapes: Iterable[str] | None = None,
    version: Callable[[], str] = str,
    ready: Callable[[Path], object] | None = None,
) -> None:
    """Have a provider measured. With another `version` earlier profiles no longer hold: for kernels
    of our own it is the digest of their sources. `ready` does what takes long and happens once, as
    building kernels does, and is told the cache folder: the budget is not for compilers."""
    if ready is not None:
        _ready[ready] = None
    for dtype in dtypes:
        for shape in SHAPES[kind] if shapes is None else shapes:
            key = RateKey(kind, provider, dtype, shape)
            CANDIDATES[key], _versions[key] = prepare, version


def get_ready(folder: Path) -> None:
    """Before the clock starts."""
    for ready in _ready:
        ready(folder)


def described() -> str:
    """Who would be measured, and on what, in one text: a part of what a profile holds for."""
    who = [f"{' '.join(key)} {_versions[key]()}" for key in sorted(_versions)]
    return "\n".join([*who, repr((_INPUTS, _OUTPUTS, _ROWS, _CONVS))])


# --- problems -------------------------------------------------------------------------------------

# Weights past the second-level cache, as those of real models are; calls of some milliseconds.
_INPUTS, _OUTPUTS = 1024, 4096
_ROWS = {"vector": 1, "small": 8, "large": 128}
# shape -> input channels, output channels, kernel, groups, side of the image. A depthwise kernel
# does so little that a large image would measure the memory, which is the same for everybody.
_CONVS = {
    "pointwise": (64, 256, 1, 1, 56),
    "spatial": (64, 64, 3, 1, 56),
    "depthwise": (128, 128, 3, 128, 28),
}


def problem(kind: str, dtype: str, shape: str, threads: int) -> Gemm | Conv:
    """The same numbers every time; no generator is touched, since a user's seed decides others."""
    element = getattr(torch, dtype)

    def filled(*sizes: int) -> torch.Tensor:
        count = torch.arange(math.prod(sizes), dtype=torch.float32, device="cpu")
        return ((count % 251 - 125) / 125).to(element).reshape(sizes)

    if kind == "gemm":
        x = filled(_ROWS[shape], _INPUTS)
        return Gemm(x, filled(_OUTPUTS, _INPUTS), filled(_OUTPUTS), threads)
    channels, outputs, kernel, groups, side = _CONVS[shape]
    return Conv(
        # Channels last, as images lie between the convolutions of a lowered graph.
        x=filled(1, side, side, channels).permute(0, 3, 1, 2),
        weight=filled(outputs, channels // groups, kernel, kernel),
        bias=filled(outputs),
        padding=(kernel // 2, kernel // 2),
        groups=groups,
        threads=threads,
    )


# --- the libraries of torch -----------------------------------------------------------------------


def _eager_linear(p: Gemm) -> Run:
    return lambda: functional.linear(p.x, p.weight, p.bias)


def _mkl_linear(p: Gemm) -> Run | None:
    if not torch.backends.mkl.is_available():
        return None
    rows, operators = p.x.shape[0], torch.ops.mkl
    packed = operators._mkl_reorder_linear_weight(p.weight, rows)
    return lambda: operators._mkl_linear(p.x, packed, p.weight, p.bias, rows)


def _multiplied(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the dtype that the regions of oneDNN multiply."""
    wide = half_precision.is_widened(tensors[0].dtype)
    return tuple(one.float() for one in tensors) if wide else tensors


def _mkldnn_linear(p: Gemm) -> Run | None:
    if not torch.backends.mkldnn.is_available():
        return None
    operators = torch.ops.mkldnn
    x, weight, bias = _multiplied(p.x, p.weight, p.bias)
    packed = operators._reorder_linear_weight(weight, x.shape[0])
    return lambda: operators._linear_pointwise(x, packed, bias, "none", [], "")


def _eager_conv(p: Conv) -> Run:
    """In the layout that models come in."""
    return lambda: functional.conv2d(p.x, p.weight, p.bias, 1, p.padding, 1, p.groups)


def _mkldnn_conv(p: Conv) -> Run | None:
    """In the layout that oneDNN likes: whoever uses it keeps the graph channels-last."""
    if not torch.backends.mkldnn.is_available():
        return None
    operators, ones, padding = torch.ops.mkldnn, (1, 1), p.padding
    x, weight, bias = _multiplied(p.x, p.weight, p.bias)
    x = x.contiguous(memory_format=torch.channels_last)
    packed = operators._reorder_convolution_weight(
        weight.contiguous(memory_format=torch.channels_last),
        padding,
        ones,
        ones,
        p.groups,
        list(x.shape),
    )
    return lambda: operators._convolution_pointwise(
        x, packed, bias, padding, ones, ones, p.groups, "none", [], ""
    )


def _nnpack_conv(p: Conv) -> Run | None:
    operator = getattr(torch, "_nnpack_spatial_convolution", None)
    if operator is None or not torch.backends.nnpack.is_available():
        return None
    return lambda: operator(p.x, p.weight, p.bias, p.padding)


@functools.cache
def _kernels_version() -> str:
    """The sources, and whether they can be built. The library's own fingerprint also has compiler
    flags, and finding those compiles something; this is asked even where nothing is compiled."""
    if not toolchain.probe().available:
        return "not here"
    digest = hashlib.sha256()
    for source in sorted(Path(library.__file__).parent.glob("*.[hc]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _built_kernels(folder: Path) -> None:
    library.keep_in(folder)
    library.probe()


def _openmp_linear(p: Gemm) -> Run | None:
    """Widening float16 around the kernel is Inductor's work, and not counted here."""
    if not library.probe().available:
        return None
    operators, nothing = torch.ops.kernel_dispatch, (None, None, None)
    if library.multiplies(p.x.dtype):
        operator, x = operators.openmp_linear_half.default, p.x
    elif p.x.dtype is torch.bfloat16:
        return None
    else:
        operator, x = operators.openmp_linear.default, p.x.float()
    return lambda: operator(x, p.weight, p.bias, *nothing, 0, 0.0, 0.0)


def _openmp_conv(p: Conv) -> Run | None:
    """Channels last, as the graph is kept for it, and 3x3 by Winograd, as it is lowered."""
    if not library.probe().available:
        return None
    operator, nothing = torch.ops.kernel_dispatch.openmp_convolution.default, (None, None, None)
    in_tiles = library.multiplies(p.x.dtype)
    image, ones = p.x if in_tiles else p.x.float(), (1, 1)
    x = image.contiguous(memory_format=torch.channels_last)
    head = (x, p.weight, p.bias, None, *nothing, 0.0, ones, p.padding, ones, p.groups)
    winograd = p.groups == 1 and p.weight.shape[-1] == 3
    way = Way.FLOAT16 if in_tiles else Way.WINOGRAD if winograd else Way.PLAIN
    return lambda: operator(*head, *nothing, 0, 0.0, 0.0, way)


def _ipex_linear(p: Gemm) -> Run | None:
    if not ipex.probe().available:
        return None
    operators = ipex.operators()  # loads IPEX: it is tried where it is installed for this torch
    packed = operators.linear_prepack(p.weight, p.bias, None)
    return lambda: operators.linear_run(p.x, packed)


def _ipex_conv(p: Conv) -> Run | None:
    if not ipex.probe().available:
        return None
    operators, ones = ipex.operators(), [1, 1]
    x = p.x.contiguous(memory_format=torch.channels_last)
    geometry = (ones, list(p.padding), ones, p.groups, True, list(x.shape))
    packed = operators.convolution_prepack(p.weight, p.bias, *geometry)
    return lambda: operators.convolution_run(x, packed)


_DTYPES = ("float32", "bfloat16", "float16")
register("gemm", EAGER, _DTYPES, _eager_linear)
register("gemm", "mkl", ("float32",), _mkl_linear)
register("gemm", "mkldnn", _DTYPES, _mkldnn_linear, version=lambda: "widened")
register("conv", EAGER, _DTYPES, _eager_conv)
register("conv", "mkldnn", _DTYPES, _mkldnn_conv, version=lambda: "widened")
for _kind, _prepare in (("gemm", _ipex_linear), ("conv", _ipex_conv)):
    register(_kind, "ipex", ("float32", "bfloat16"), _prepare, version=ipex.version)
# NNPACK has no groups, and its gain is in the 3x3 convolutions.
register("conv", "nnpack", ("float32",), _nnpack_conv, shapes=("spatial",))
for _kind, _dtypes, _prepare in (
    ("gemm", _DTYPES, _openmp_linear),
    ("conv", ("float32", "float16"), _openmp_conv),
):
    register(
        _kind,
        "openmp",
        _dtypes,
        _prepare,
        version=_kernels_version,
        ready=_built_kernels,
    )
