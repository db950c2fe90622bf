"""oneDNN (which torch calls mkldnn): linear layers with prepacked weights, in inference.

The graph keeps the weight as an input and calls an operator of ours that owns the packed form.
So an updated weight is seen, equal layers share a compiled graph, and cache keys do not depend on
the values of weights.
"""

from __future__ import annotations

import torch

from lowering import libraries, observing
from lowering.contract import Probe, Provider
from lowering.packing import PackedWeights


def probe() -> Probe:
    if not torch.backends.mkldnn.is_available():
        return Probe.no("this torch was built without oneDNN")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Probe.no("this torch has no mkldnn::_linear_pointwise")
    return Probe.yes(libraries.onednn_version())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


weights = PackedWeights(_pack)

_library = torch.library.Library("kernel_dispatch", "DEF")
_library.define("mkldnn_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not input.numel() or not weight.numel():  # oneDNN has no empty products
        observing.region_ran("linear", "eager")
        return torch.nn.functional.linear(input, weight, bias)
    observing.region_ran("linear", "mkldnn")
    packed = weights.get(weight)
    return torch.ops.mkldnn._linear_pointwise(input.contiguous(), packed, bias, "none", [], "")


def _linear_meta(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


_library.impl("mkldnn_linear", _linear, "CPU")
torch.library.register_fake("kernel_dispatch::mkldnn_linear", _linear_meta, lib=_library)


PROVIDER = Provider(
    name="mkldnn",
    summary="oneDNN with prepacked weights, for linear layers in inference",
    probe=probe,
)
