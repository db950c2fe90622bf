"""Triton kernels of ours, where they win over torch's own and over what Inductor generates."""

from __future__ import annotations

from typing import Any

from torch import fx

from lowering.contract import Probe, Provider, RegionMaker
from lowering.regions.attention_call import AttentionCall
from lowering.regions.calls import value_of
from lowering.regions.cross_entropy import CrossEntropy, LinearCrossEntropy
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear_call import LinearCall
from triton_kernels import availability


def probe() -> Probe:
    found = availability.status()
    if not found.usable:
        return Probe.no(found.reason, "pip install triton" if not found.importable else "")
    return Probe.yes(found.version)


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
    summary="Triton kernels of ours: losses over large vocabularies, layers in fewer bits",
    probe=probe,
    requires=("Triton, and a GPU that it knows",),
    early_regions={
        "linear": RegionMaker(_emit_linear, refuses=_refuses_linear),
        "attention": RegionMaker(_emit_decode, refuses=_refuses_decode, silent=True),
        "cross_entropy": RegionMaker(_emit_cross_entropy, silent=True),
        "linear_cross_entropy": RegionMaker(
            _emit_linear_cross_entropy, refuses=_refuses_linear_cross_entropy, silent=True
        ),
    },
)
