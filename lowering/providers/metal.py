"""Metal kernels of ours, where torch's own on Apple GPUs are weak: norms, rotations, steps of
decoding, and at O3 weights in eight bits. For inference."""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowering.contract import Probe, Provider, RegionMaker
from lowering.graphs import call, hint
from lowering.metal.whole_norm import whole
from lowering.regions.attention_call import AttentionCall
from lowering.regions.calls import value_of
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear_call import LinearCall
from lowering.regions.norm import Norm
from lowering.regions.rope import Rope

aten = torch.ops.aten
_TRIAL = """#include <metal_stdlib>
kernel void trial(device float* out [[buffer(0)]]) { out[0] = 1.0f; }
"""
_MOST_ROWS = 16  # with more of them the weight is read several times, or a product is faster


def probe() -> Probe:
    """A torch that compiles Metal shaders, tried with a small one. Asked for graphs on a Mac."""
    if not torch.backends.mps.is_available():
        return Probe.no("torch sees no Metal device")
    problem = _problem_with(torch.mps.compile_shader)
    return Probe.no(problem) if problem else Probe.yes(torch.__version__)


@functools.cache
def _problem_with(compile_shader: Callable[[str], Any]) -> str:
    try:
        compile_shader(_TRIAL)
    except Exception as error:  # noqa: BLE001  (the compiler's word becomes the reason)
        return f"torch compiles no Metal shader: {type(error).__name__}: {error}"
    return ""


def metal_operator(family: str) -> Any:
    """The operator exists once its family was imported."""
    return importlib.import_module(f"lowering.metal.{family}").OPERATOR


# --- norm -----------------------------------------------------------------------------------------


def _emit_norm(graph: fx.Graph, match: Norm, epilogue: Epilogue) -> dict[fx.Node, fx.Node]:
    found = whole(match)
    assert found is not None, "refused"
    with graph.inserting_before(found.last):
        inputs = (found.input, found.residual, found.weight, found.eps)
        both = call(graph, metal_operator("rms_norm"), *inputs)
        parts = {call(graph, operator.getitem, both, 0): found.last}
        if found.sum is not None:
            parts[call(graph, operator.getitem, both, 1)] = found.sum
    return parts


def _refuses_norm(match: Norm) -> str:
    if match.kind != "rms":
        return "LayerNorm stays with torch"
    return "" if whole(match) else "the norm's result is not of its input's dtype"


# --- rope -----------------------------------------------------------------------------------------


def _emit_rope(graph: fx.Graph, match: Rope, epilogue: Epilogue) -> dict[fx.Node, fx.Node]:
    """Query and key in one launch."""
    angles = [call(graph, aten.squeeze.dim, n, 1) for n in (match.query.cos, match.query.sin)]
    turned = (match.query.input, match.key.input)
    both = call(graph, metal_operator("rope"), *turned, *angles, match.interleaved)
    parts = [call(graph, operator.getitem, both, index) for index in (0, 1)]
    return dict(zip(parts, (match.query.node, match.key.node), strict=True))


def _refuses_rope(match: Rope) -> str:
    turned = [node.meta["val"] for node in (match.query.input, match.key.input)]
    angles = [node.meta["val"] for node in (match.query.cos, match.query.sin)]
    size = turned[0].shape[-1]
    if any(one.dim() != 4 for one in (*turned, *angles)) or any(
        one.shape[1] != 1 for one in angles
    ):
        return "the angles are not the same for all heads"
    if not isinstance(size, int) or size % 2 or any(one.shape[-1] != size for one in angles):
        return "the size of a head changes, is odd, or is not that of the angles"
    if any(one.dtype != match.dtype for one in (*turned, *angles)):
        return "query, key and angles are of several dtypes"
    return ""


# --- attention ------------------------------------------------------------------------------------


def _emit_decode(graph: fx.Graph, match: AttentionCall, epilogue: Epilogue) -> fx.Node:
    scale = match.scale
    if scale is None:
        scale = 1 / math.sqrt(value_of(match.query).shape[-1])
    inputs = (match.query, match.key, match.value, match.mask, float(scale))
    return graph.call_function(metal_operator("decode_attention"), inputs)


def _refuses_decode(match: AttentionCall) -> str:
    query, key, value = (value_of(n) for n in (match.query, match.key, match.value))
    if match.dropout or match.causal:
        return "the step of decoding has dropout or is_causal"
    if match.scale is not None and not isinstance(match.scale, (int, float)):
        return "the scale is computed by the graph"
    sizes = (query.shape[-1], value.shape[-1])
    if not all(isinstance(size, int) and size <= 256 for size in sizes):
        return "heads are larger than 256"
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        return "the heads are no multiple of the cache's"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "query, key and value are of several dtypes"
    return _refuses_mask(match.mask, query)


def _refuses_mask(mask: Any, query: torch.Tensor) -> str:
    if mask is None:
        return ""
    value = value_of(mask)
    if value is None or value.dim() > 4 or value.dtype not in (torch.bool, query.dtype):
        return f"masks are of bool or of {query.dtype}, with four dimensions at most"
    return ""


# --- linear ---------------------------------------------------------------------------------------


def _emit_linear(graph: fx.Graph, match: LinearCall, epilogue: Epilogue) -> fx.Node:
    from lowering.metal import int8_linear  # noqa: F401  (defines the operator)

    target = torch.ops.kernel_dispatch.metal_int8_linear.default
    return graph.call_function(target, (match.input, match.weight, match.bias))


def _refuses_linear(match: LinearCall) -> str:
    rows = math.prod(hint(size) for size in value_of(match.input).shape[:-1])
    if rows > _MOST_ROWS:
        return f"more than {_MOST_ROWS} rows"
    if any(side % 16 for side in value_of(match.weight).shape):
        return "a side of the weight is no multiple of 16"
    return "" if match.stays else "the weight is computed by the graph"


PROVIDER = Provider(
    name="metal",
    summary="Metal kernels of ours: norms, rotations, steps of decoding, weights in eight bits",
    probe=probe,
    requires=("macOS 14 on Apple silicon",),
    regions={
        "norm": RegionMaker(_emit_norm, refuses=_refuses_norm),
        "rope": RegionMaker(_emit_rope, refuses=_refuses_rope),
    },
    early_regions={
        "attention": RegionMaker(_emit_decode, refuses=_refuses_decode),
        "linear": RegionMaker(_emit_linear, refuses=_refuses_linear),
    },
)
