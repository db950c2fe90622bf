"""Triton kernels of ours, where they win over torch's own and over what Inductor generates."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from torch import fx

from lowering.contract import Probe, Provider, RegionMaker
from lowering.graphs import call
from lowering.regions.attention_call import AttentionCall
from lowering.regions.calls import value_of
from lowering.regions.cross_entropy import CrossEntropy, LinearCrossEntropy
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear_call import LinearCall
from lowering.regions.rope import Rope
from triton_kernels import availability

aten = torch.ops.aten


def probe() -> Probe:
    found = availability.status()
    if not found.usable:
        return Probe.no(found.reason, "pip install triton" if not found.importable else "")
    return Probe.yes(found.version)


def triton_operator(family: str, name: str) -> Any:
    """`torch.ops.triton_kernels.<name>`; operators exist once their family was imported."""
    importlib.import_module(f"triton_kernels.families.{family}")
    return getattr(torch.ops.triton_kernels, name).default


def _emit_decode(graph: fx.Graph, match: AttentionCall, epilogue: Epilogue) -> fx.Node:
    from triton_kernels import decode_attention

    inputs = (match.query, match.key, match.value)
    return graph.call_function(decode_attention, inputs, {"scale": match.scale})


def _refuses_decode(match: AttentionCall) -> str:
    query, key, value = (value_of(n) for n in (match.query, match.key, match.value))
    if match.mask is not None or match.dropout or match.causal:
        return "the step of decoding has a mask, dropout or is_causal"
    if query.shape[1] % key.shape[1] or key.shape != value.shape:
        return "key and value are not of one size, or the heads are no multiple of theirs"
    return "" if query.shape[-1] <= 256 else "heads are larger than 256"


def _emit_cross_entropy(graph: fx.Graph, match: CrossEntropy, epilogue: Epilogue) -> fx.Node:
    from triton_kernels import cross_entropy

    more = {"weight": match.weight, **_of_loss(match)}
    return graph.call_function(cross_entropy, (match.logits, match.target), more)


def _emit_linear_cross_entropy(
    graph: fx.Graph, match: LinearCrossEntropy, epilogue: Epilogue
) -> fx.Node:
    from triton_kernels import linear_cross_entropy

    size = value_of(match.hidden).shape[-1]
    hidden = graph.call_method("reshape", (match.hidden, -1, size))
    more = {"bias": match.bias, **_of_loss(match.loss)}
    inputs = (hidden, match.weight, match.loss.target)
    return graph.call_function(linear_cross_entropy, inputs, more)


def _emit_rope(graph: fx.Graph, match: Rope, epilogue: Epilogue) -> dict[fx.Node, fx.Node]:
    """Query and key in one launch."""
    forward = triton_operator("rope", "rope_forward")
    query, key = match.query.norm, match.key.norm
    assert query is not None and key is not None, "refused"
    size = match.node.meta["val"].shape[-1]
    angles = [_first_half(graph, angle, size) for angle in (match.query.cos, match.query.sin)]
    straight = [call(graph, aten.permute.default, n.input, list(n.order)) for n in (query, key)]
    both = call(
        graph,
        forward,
        *straight,
        *angles,
        query.weight,
        key.weight,
        query.eps,
        size,
        False,  # pairs are half a head apart
        False,  # not turned back
    )
    parts = [call(graph, operator.getitem, both, index) for index in (0, 1)]
    return dict(zip(parts, (match.query.node, match.key.node), strict=True))


def _emit_linear(graph: fx.Graph, match: LinearCall, epilogue: Epilogue) -> fx.Node:
    """In int8 weights for few rows, in 8-bit floats for many: O3, within the tolerance."""
    from lowering import reduced_linear

    kind = "fp8" if match.work().shape_class == "large" else "int8"
    target = reduced_linear.OPERATOR
    return graph.call_function(target, (match.input, match.weight, match.bias, kind))


def _refuses_linear(match: LinearCall) -> str:
    sides = value_of(match.weight).shape
    if any(side % 16 for side in sides):
        return "a side of the weight is no multiple of 16"
    return "" if match.stays else "the weight is computed by the graph"


def _first_half(graph: fx.Graph, angle: fx.Node, size: int) -> fx.Node:
    """(batch, tokens, size / 2) of angles that stand as (batch, 1, tokens, size)."""
    of_tokens = call(graph, aten.squeeze.dim, angle, 1)
    return call(graph, aten.slice.Tensor, of_tokens, 2, 0, size // 2)


def _refuses_rope(match: Rope) -> str:
    angles = match.query.cos.meta["val"]
    if angles.dim() != 4 or angles.shape[1] != 1:
        return "the angles are not the same for all heads"
    if not isinstance(match.node.meta["val"].shape[-1], int):
        return "the size of a head changes"
    return ""


def _of_loss(match: CrossEntropy) -> dict[str, Any]:
    return {
        "ignore_index": match.ignore_index,
        "reduction": match.reduction,
        "label_smoothing": match.label_smoothing,
    }


def _refuses_linear_cross_entropy(match: LinearCrossEntropy) -> str:
    return "a loss for each token" if match.loss.reduction == "none" else ""


PROVIDER = Provider(
    name="triton",
    summary="Triton kernels of ours: steps of decoding, losses over large vocabularies, rotations",
    probe=probe,
    requires=("Triton, and a GPU that it knows",),
    regions={
        "rope": RegionMaker(_emit_rope, refuses=_refuses_rope, silent=True),
    },
    early_regions={
        "linear": RegionMaker(_emit_linear, refuses=_refuses_linear),
        "attention": RegionMaker(_emit_decode, refuses=_refuses_decode, silent=True),
        "cross_entropy": RegionMaker(_emit_cross_entropy, silent=True),
        "linear_cross_entropy": RegionMaker(
            _emit_linear_cross_entropy, refuses=_refuses_linear_cross_entropy, silent=True
        ),
    },
)
