"""cuSPARSELt: linear layers whose weights have two zeros among every four numbers of a row.

The weight is compressed once, and again when it changes; what has lost its zeros since is
multiplied as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering import observing
from lowering.contract import Probe, Provider, RegionMaker
from lowering.packing import PackedWeights
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear_call import LinearCall


def probe() -> Probe:
    library: Any = getattr(torch.backends, "cusparselt", None)
    if library is None or not library.is_available():
        return Probe.no("this torch has no cuSPARSELt, or no NVIDIA GPU is here")
    return Probe.yes(str(library.version()))


def is_two_of_four(weight: torch.Tensor) -> bool:
    """At most two of every four neighbours in a row are not zero."""
    if weight.shape[1] % 4 or not weight.numel():
        return False
    filled = weight.reshape(-1, 4).count_nonzero(1)
    return bool((filled <= 2).all())


def _compressed(weight: torch.Tensor) -> Any:
    if not is_two_of_four(weight):
        return None
    return torch.sparse.to_sparse_semi_structured(weight.contiguous())


_weights = PackedWeights()


@torch.library.custom_op("kernel_dispatch::cusparselt_linear", mutates_args=())
def cusparselt_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    compressed = _weights.get((weight,), "two-of-four", lambda: _compressed(weight))
    if compressed is None:
        return functional.linear(x, weight, bias)
    observing.region_ran("linear", "cusparselt")
    rows = x.reshape(-1, x.shape[-1])
    return functional.linear(rows, compressed, bias).reshape(*x.shape[:-1], weight.shape[0])


@cusparselt_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _refuses(match: LinearCall) -> str:
    weight = match.real_weight
    if weight is None:
        return "the weight's numbers cannot be read while compiling"
    if any(size % 64 for size in weight.shape):
        return "a side of the weight is no multiple of 64"
    return "" if is_two_of_four(weight) else "the weight has not two zeros among every four"


def _emit(graph: fx.Graph, match: LinearCall, epilogue: Epilogue) -> fx.Node:
    return graph.call_function(
        torch.ops.kernel_dispatch.cusparselt_linear.default, (match.input, match.weight, match.bias)
    )


PROVIDER = Provider(
    name="cusparselt",
    summary="NVIDIA's library for weights with two zeros among every four numbers",
    probe=probe,
    requires=("a CUDA build of torch, Ampere or newer",),
    early_regions={"linear": RegionMaker(_emit, refuses=_refuses)},
)
