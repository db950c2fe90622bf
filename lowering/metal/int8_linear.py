"""Linear layers with few rows and an int8 weight, at O3: each is checked on its first real inputs,
and again whenever its weight changes. One that is further off than the tolerance allows is computed
as it stands from then on, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lowering import observing
from lowering.metal import int8_matmul
from lowering.metal.registration import PROVIDER
from lowering.packing import PackedWeights
from lowering.reasons import Reason

_weights = PackedWeights()


@dataclass
class _Packed:
    """A weight in eight bits, and whether it was near enough; None until it was tried."""

    values: Tensor
    scale: Tensor
    near: bool | None = None


@torch.library.custom_op("kernel_dispatch::metal_int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found = _weights.get((weight,), "metal int8", lambda: _packed(weight))
    if found.near is False:
        return functional.linear(x, weight, bias)
    out = int8_matmul.OPERATOR(x, found.values, found.scale, bias)
    if found.near is None:
        exact = functional.linear(x, weight, bias)
        error, allowed = _distance(out, exact), observing.tolerance()
        found.near = error <= allowed
        if not found.near:
            observing.region_demoted("linear", PROVIDER, _reason(error, allowed))
            return exact
    return out


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _packed(weight: Tensor) -> _Packed:
    """The largest number of each row of the weight becomes 127 or -127."""
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp_min(1e-10) / 127
    return _Packed((wide / scale[:, None]).round().to(torch.int8), scale)


def _distance(out: Tensor, exact: Tensor) -> float:
    """The relative L2 error; NaN or infinity where only one of the two has them."""
    length = torch.linalg.vector_norm(exact.float()).clamp_min(1e-30)
    return float(torch.linalg.vector_norm(out.float() - exact.float()) / length)


def _reason(error: float, allowed: float) -> Reason:
    text = (
        f"a linear layer with an int8 weight was off by {error:.2g} on its first inputs, and the "
        f"tolerance is {allowed:g}: it stays as it is"
    )
    return Reason("over-tolerance", text)
