"""Linear layers in fewer bits, at O3: each is checked on its first real inputs, and again whenever
its weight changes. One that is further from the layer itself than the tolerance allows is computed
as it stands from then on, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from lowering import observing
from lowering.packing import PackedWeights
from lowering.reasons import Reason
from triton_kernels import architectures

Tensor = torch.Tensor
_weights = PackedWeights()


@dataclass
class _Reduced:
    """A weight in eight bits, and whether it was near enough; None until it was tried."""

    values: Tensor
    scale: Tensor
    near: bool | None = None


@torch.library.custom_op("kernel_dispatch::reduced_linear", mutates_args=())
def reduced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """`kind`: "int8" for weights only, "fp8" for both sides of the product."""
    found = _weights.get((weight,), kind, lambda: _reduced(weight, kind))
    if found.near is False:
        return functional.linear(x, weight, bias)
    out = _multiply(x, found, bias, kind)
    if found.near is None:
        exact = functional.linear(x, weight, bias)
        error, allowed = _distance(out, exact), observing.tolerance()
        found.near = error <= allowed
        if not found.near:
            observing.region_demoted("linear", "triton", _reason(kind, error, allowed))
            return exact
    observing.region_ran("linear", "triton")
    return out


@reduced_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _reduced(weight: Tensor, kind: str) -> _Reduced:
    from triton_kernels import quantise_rows, quantise_weight

    if kind == "int8":
        return _Reduced(*quantise_weight(weight))
    return _Reduced(*quantise_rows(weight, dtype=_fp8(weight)))


def _multiply(x: Tensor, weight: _Reduced, bias: Tensor | None, kind: str) -> Tensor:
    from triton_kernels import int8_weight_matmul, quantise_rows, scaled_matmul

    rows = x.reshape(-1, x.shape[-1])
    if kind == "int8":
        out = int8_weight_matmul(rows, weight.values, weight.scale, bias=bias)
    else:
        values, scale = quantise_rows(rows, dtype=weight.values.dtype)
        out = scaled_matmul(
            values, weight.values.t(), scale, weight.scale, bias=bias, out_dtype=x.dtype
        )
    return out.reshape(*x.shape[:-1], weight.values.shape[0])


def on_paper(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The product alone, on tensors of the device "meta": for plans."""
    dtype = torch.int8 if kind == "int8" else _fp8(weight)
    scale = weight.new_empty(weight.shape[0], dtype=torch.float32)
    return _multiply(x, _Reduced(weight.new_empty(weight.shape, dtype=dtype), scale), bias, kind)


def _fp8(weight: Tensor) -> torch.dtype:
    """The eight-bit float of that GPU: AMD's first ones have one of their own."""
    found: torch.dtype = getattr(torch, architectures.of(weight.device).fp8[0])
    return found


def _distance(out: Tensor, exact: Tensor) -> float:
    """The relative L2 error; NaN or infinity where only one of the two has them."""
    length = torch.linalg.vector_norm(exact.float())
    return float(torch.linalg.vector_norm(out.float() - exact.float()) / length.clamp_min(1e-30))


def _reason(kind: str, error: float, allowed: float) -> Reason:
    text = (
        f"a linear layer in {kind} was off by {error:.2g} on its first inputs, and the tolerance "
        f"is {allowed:g}: it stays as it is"
    )
    return Reason("over-tolerance", text)
