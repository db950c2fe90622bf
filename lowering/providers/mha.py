"""Fused attention: on CPUs a C++ kernel of ours that never writes the matrix of scores.

On GPUs torch's own operator is that (flash and memory-efficient attention), and stays as it is.

Torch's own operator does its products through the BLAS that torch was built with; this one does not
leave registers and caches between the two products, reads grouped heads once, and splits the keys
of a one-token step over threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.contract import Probe, Provider, RegionMaker
from lowering.native import library
from lowering.providers import cudnn
from lowering.regions.attention import Attention
from lowering.regions.attention_call import AttentionCall, by_name
from lowering.regions.epilogue import Epilogue
from lowering.regions.widening import widened


def probe() -> Probe:
    """On GPUs torch's own fused kernels, on CPUs ours."""
    if torch.cuda.is_available():
        return Probe.yes(torch.__version__)
    return library.probe()


def _emit(graph: fx.Graph, match: Attention, epilogue: Epilogue) -> fx.Node:
    """Queries, keys and values as they come: half precision is widened as it is read."""
    mask = None if match.mask is None else widened(graph, match.mask)
    return graph.call_function(
        torch.ops.kernel_dispatch.mha_attention.default,
        (match.query, match.key, match.value, mask, match.causal, match.scale),
    )


def _refuses(match: Attention) -> str:
    """Torch adds a mask of another dtype in that dtype; that rounding is not imitated here."""
    ours = library.probe()  # where a GPU is, `probe` above does not ask for it
    if not ours.available:
        return ours.reason
    if match.mask is None:
        return ""
    mask = match.mask.meta["val"]
    if mask.dtype not in (torch.bool, match.dtype):
        return f"mha takes masks of bool and {match.dtype}, not {mask.dtype}"
    return ""


def _emit_torchs(graph: fx.Graph, match: AttentionCall, epilogue: Epilogue) -> fx.Node:
    """On GPUs: the call as it stands, but for numbers that one of torch's choices gets wrong."""
    attend: Any = functional.scaled_dot_product_attention
    if cudnn.misreads_mask(match):
        attend = _by_products
    elif cudnn.loses_gradients(match):
        attend = _without_cudnn
    return graph.call_function(attend, (), by_name(match.node))


def _by_products(query: Any, key: Any, value: Any, **more: Any) -> Any:
    """The only one of torch's kernels that takes a mask of any dtype at its word."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(query, key, value, **more)


def _without_cudnn(query: Any, key: Any, value: Any, **more: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others):
        return functional.scaled_dot_product_attention(query, key, value, **more)


PROVIDER = Provider(
    name="mha",
    summary="Fused attention: on CPUs a C++ kernel of ours, on GPUs torch's own kernels",
    probe=probe,
    requires=("a C++ compiler (GCC or Clang)",),
    regions={"attention": RegionMaker(_emit, refuses=_refuses)},
    early_regions={"attention": RegionMaker(_emit_torchs, silent=True)},
)
