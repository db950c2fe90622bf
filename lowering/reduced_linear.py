"""Linear layers in fewer bits, at O3: each is checked on its first real inputs, and again whenever
its weight changes. One that is further from the layer itself than the tolerance allows is computed
as it stands from then on, and the report says so.

CUDA graphs replay launches, and no Python: so weights are made ready ahead of the graph, where no
graph's memory is in use; they keep their addresses when a weight changes; and where such a weight
is too far off then, the call runs as it was captured by Dynamo, without what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from lowering import observing
from lowering.contract import Graph
from lowering.packing import PackedWeights
from lowering.reasons import Reason
from triton_kernels import architectures

Tensor = torch.Tensor


@dataclass
class _Reduced:
    """A weight in eight bits, and whether it was near enough; None until it was tried."""

    values: Tensor
    scale: Tensor
    near: bool | None = None
    recorded: bool = False  # a CUDA graph reads these tensors, whatever is found of them later


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> {kind: _Reduced}


class _Weights(PackedWeights):
    """What no CUDA graph reads is given back when all packed forms are."""

    def clear(self) -> None:
        super().clear()
        for kinds in list(_made.values()):
            for kind in [kind for kind, one in kinds.items() if not one.recorded]:
                del kinds[kind]


_weights = _Weights()


@torch.library.custom_op("kernel_dispatch::reduced_linear", mutates_args=())
def reduced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """`kind`: "int8" for weights only, "fp8" for both sides of the product."""
    found = _found(weight, kind)
    recording = _recording(x)
    if found.near is False or (found.near is None and recording):  # nothing can be compared there
        return functional.linear(x, weight, bias)
    out = _multiply(x, found, bias, kind)
    if found.near is None:
        exact = functional.linear(x, weight, bias)
        if not _judged(found, _distance(out, exact), kind, "on its first inputs"):
            return exact
    found.recorded |= recording
    return out


@reduced_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _recording(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


OPERATOR = torch.ops.kernel_dispatch.reduced_linear.default


# --- around the graph -----------------------------------------------------------------------------


def made_ready(run: Graph, layers: Sequence[tuple[int, str]], exact: Graph) -> Graph:
    """`run` behind what its layers need: of each, which input is its weight, and the kind.

    It counts them, since what is replayed cannot. `exact` computes the same as it was captured.
    """

    def call(*args: Any) -> Any:
        found = [_found(args[i], kind) for i, kind in layers]
        for one, (i, kind) in zip(found, layers, strict=True):
            if one.recorded and one.near is None:
                _judged(one, _weight_error(one, args[i]), kind, "by its new weight")
        if any(one.recorded and not one.near for one in found):
            return exact(*args)
        result = run(*args)
        if times := sum(one.near is True for one in found):
            observing.region_ran("linear", "triton", times)
        return result

    return call


# --- weights --------------------------------------------------------------------------------------


def _found(weight: Tensor, kind: str) -> _Reduced:
    found: _Reduced = _weights.get((weight,), kind, partial(_reduced, weight, kind))
    return found


def _reduced(weight: Tensor, kind: str) -> _Reduced:
    """In the tensors of the weight's last numbers, where there are any."""
    new = _quantised(weight, kind)
    if weight.is_inference():  # whether it changes cannot be told: nothing of it is kept
        return new
    kinds = _made.setdefault(weight, {})
    last = kinds.get(kind)
    if last is None or last.values.shape != new.values.shape or last.values.device != weight.device:
        kinds[kind] = new
        return new
    last.values.copy_(new.values)
    last.scale.copy_(new.scale)
    last.near = None
    return last


def _quantised(weight: Tensor, kind: str) -> _Reduced:
    from triton_kernels import quantise_rows, quantise_weight

    if kind == "int8":
        return _Reduced(*quantise_weight(weight))
    return _Reduced(*quantise_rows(weight, dtype=_fp8(weight)))


def _multiply(x: Tensor, weight: _Reduced, bias: Tensor | None, kind: str) -> Tensor:
    from triton_kernels import int8_weight_matmul, quantise_rows

    rows = x.reshape(-1, x.shape[-1])
    if kind == "int8":
        out = int8_weight_matmul(rows, weight.values, weight.scale, bias=bias)
    else:
        values, scale = quantise_rows(rows, dtype=weight.values.dtype)
        out = _product(values, scale, weight, bias, x.dtype)
    return out.reshape(*x.shape[:-1], weight.values.shape[0])


def _product(
    values: Tensor, scale: Tensor, weight: _Reduced, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """By the vendor's library where it takes a scale for each row; it is half again as fast."""
    from triton_kernels import scaled_matmul

    if values.is_cuda and dtype is torch.bfloat16 and _library_scales_rows(values.device):
        by_row, by_column = scale[:, None], weight.scale[None, :]
        out = torch._scaled_mm(values, weight.values.t(), by_row, by_column, out_dtype=dtype)
        return out if bias is None else out + bias
    return scaled_matmul(values, weight.values.t(), scale, weight.scale, bias=bias, out_dtype=dtype)


def _library_scales_rows(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def on_paper(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The product alone, on tensors of the device "meta": for plans."""
    dtype = torch.int8 if kind == "int8" else _fp8(weight)
    scale = weight.new_empty(weight.shape[0], dtype=torch.float32)
    return _multiply(x, _Reduced(weight.new_empty(weight.shape, dtype=dtype), scale), bias, kind)


def _fp8(weight: Tensor) -> torch.dtype:
    """The eight-bit float of that GPU: AMD's first ones have one of their own."""
    found: torch.dtype = getattr(torch, architectures.of(weight.device).fp8[0])
    return found


def _judged(found: _Reduced, error: float, kind: str, when: str) -> bool:
    allowed = observing.tolerance()
    found.near = error <= allowed
    if not found.near:
        observing.region_demoted("linear", "triton", _reason(kind, error, allowed, when))
    return found.near


def _weight_error(found: _Reduced, weight: Tensor) -> float:
    """Of the layer's result about as much, for inputs that have nothing to do with the rounding."""
    return _distance(found.values.float() * found.scale.float()[:, None], weight)


def _distance(out: Tensor, exact: Tensor) -> float:
    """The relative L2 error; NaN or infinity where only one of the two has them."""
    length = torch.linalg.vector_norm(exact.float())
    return float(torch.linalg.vector_norm(out.float() - exact.float()) / length.clamp_min(1e-30))


def _reason(kind: str, error: float, allowed: float, when: str) -> Reason:
    text = (
        f"a linear layer in {kind} was off by {error:.2g} {when}, and the tolerance is "
        f"{allowed:g}: it stays as it is"
    )
    return Reason("over-tolerance", text)
