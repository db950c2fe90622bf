"""cuDNN: attention in half precision, and convolutions, on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.contract import Probe, Provider, RegionMaker
from lowering.regions.attention_call import AttentionCall
from lowering.regions.epilogue import Epilogue


def probe() -> Probe:
    if not torch.backends.cudnn.is_available():
        return Probe.no("this torch has no cuDNN, or no NVIDIA GPU is here")
    return Probe.yes(str(torch.backends.cudnn.version()))


def attention(query: Any, key: Any, value: Any, **more: Any) -> Any:
    """Torch's own attention with cuDNN as first choice; it takes the next where cuDNN cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        return functional.scaled_dot_product_attention(query, key, value, **more)


def _emit_attention(graph: fx.Graph, match: AttentionCall, epilogue: Epilogue) -> fx.Node:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, match.node.args, strict=False)), **match.node.kwargs}
    return graph.call_function(attention, (), given)


PROVIDER = Provider(
    name="cudnn",
    summary="NVIDIA's library: attention in half precision, convolutions",
    probe=probe,
    requires=("a CUDA build of torch",),
    early_regions={
        "attention": RegionMaker(_emit_attention, silent=True),
        "convolution": RegionMaker(None),
    },
)
