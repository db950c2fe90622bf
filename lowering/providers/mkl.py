"""Intel MKL: linear layers in float32 whose weight is laid out once instead of in every call.

The packed form is made for one number of rows, so only layers whose number of rows is fixed are
taken. With one to three rows MKL's packed product is up to four times as inexact as its plain one
(measured: 8192x64, error 3.2e-6 against 8.7e-7), which would break the contract of O1: those are
left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx

from lowering import direct_calls, libraries, observing
from lowering.contract import Probe, Provider, RegionMaker
from lowering.native import library, shapes
from lowering.packing import PackedWeights, Place, out_in
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear import Linear

_FEWEST_ROWS = 4


def probe() -> Probe:
    if not torch.backends.mkl.is_available():
        return Probe.no("this torch was built without MKL")
    if not hasattr(torch.ops.mkl, "_mkl_linear"):
        return Probe.no("this torch has no mkl::_mkl_linear")
    return Probe.yes(libraries.mkl_version())


weights = PackedWeights()
_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "mkl_linear(Tensor input, Tensor weight, Tensor? bias, bool in_out=False) -> Tensor"
)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_out: bool = False
) -> torch.Tensor:
    return _every_linear(in_out)(input, weight, bias)


def _one_linear(in_out: bool = False) -> Callable[..., torch.Tensor]:
    """What one call in a graph computes; `in_out`: the weight is stored as (in, out)."""
    place = Place(weights)

    def linear(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        plain = out_in(weight, in_out)
        if not input.numel() or not weight.numel():  # MKL forgets the bias of an empty product
            observing.region_ran("linear", "eager")
            return torch.nn.functional.linear(input, plain, bias)
        observing.region_ran("linear", "mkl")
        rows = input.numel() // input.shape[-1]
        packed = place.get((weight,), (rows, in_out), functools.partial(_pack, plain, rows))
        return torch.ops.mkl._mkl_linear(input.contiguous(), packed, plain, bias, rows)

    return linear


_every_linear = functools.cache(_one_linear)


def _pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), rows)


_library.impl("mkl_linear", _linear, "CPU")
direct_calls.offer(torch.ops.kernel_dispatch.mkl_linear.default, 3, _one_linear)
torch.library.register_fake("kernel_dispatch::mkl_linear", shapes.mkl_linear, lib=_library)


def _operator() -> torch._ops.OpOverload:
    """The one in C++ is called sooner, where our kernels are built: not at O1, by themselves."""
    operators = torch.ops.kernel_dispatch
    if library.is_loaded():
        return operators.mkl_linear_native.default
    return operators.mkl_linear.default


def _emit(graph: fx.Graph, match: Linear, epilogue: Epilogue) -> fx.Node:
    arguments = (match.input, match.weight, match.bias, match.in_out)
    return graph.call_function(_operator(), arguments)


def _refuses(match: Linear) -> str:
    if any(not isinstance(size, int) for size in match.input.meta["val"].shape[:-1]):
        return "mkl packs a weight for one number of rows, and here that number changes"
    if match.rows < _FEWEST_ROWS:
        return f"mkl's packed product is too inexact below {_FEWEST_ROWS} rows"
    parts = [match.weight, *([] if match.bias is None else [match.bias])]
    if any(part.meta["val"].dtype != match.dtype for part in parts):
        return "mkl takes weights in the dtype that is computed in"
    return ""


PROVIDER = Provider(
    name="mkl",
    summary="Intel MKL with prepacked weights: linear layers in inference",
    probe=probe,
    regions={"linear": RegionMaker(_emit, refuses=_refuses)},
)
