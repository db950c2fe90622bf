"""cuDNN: attention in half precision, and convolutions, on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.contract import Probe, Provider, RegionMaker
from lowering.regions.attention_call import AttentionCall, by_name
from lowering.regions.calls import value_of
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


# Before it, torch itself leaves cuDNN's attention alone: it reads beyond tensors (pytorch#169849).
_OLDEST = 91501


def _refuses_attention(match: AttentionCall) -> str:
    version = _version_here()
    if version is not None and version < _OLDEST:
        return f"cuDNN {version} is older than {_OLDEST}"
    if misreads_mask(match):
        return "torch gives cuDNN a mask of another dtype as one of the query's (pytorch#191612)"
    if loses_gradients(match):
        return (
            "cuDNN's gradients under a mask are NaN for 64 keys beside whole 128s (pytorch#196678)"
        )
    return ""


def _version_here() -> int | None:
    """None for plans of a GPU that is not here: it will have a cuDNN of its own."""
    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


def misreads_mask(match: AttentionCall) -> bool:
    """Torch chooses cuDNN all the same, or another kernel that raises."""
    mask = value_of(match.mask)
    return mask is not None and mask.dtype not in (torch.bool, value_of(match.query).dtype)


def loses_gradients(match: AttentionCall) -> bool:
    """Torch chooses cuDNN all the same."""
    if value_of(match.mask) is None:
        return False
    wanted = any(value_of(n).requires_grad for n in (match.query, match.key, match.value))
    keys = value_of(match.key).shape[-2]
    return wanted and isinstance(keys, int) and keys % 128 == 64


def _emit_attention(graph: fx.Graph, match: AttentionCall, epilogue: Epilogue) -> fx.Node:
    return graph.call_function(attention, (), by_name(match.node))


PROVIDER = Provider(
    name="cudnn",
    summary="NVIDIA's library: attention in half precision, convolutions",
    probe=probe,
    requires=("a CUDA build of torch",),
    early_regions={
        "attention": RegionMaker(_emit_attention, refuses=_refuses_attention, silent=True),
        "convolution": RegionMaker(None),
    },
)
