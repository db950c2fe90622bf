"""The quantized_linear region: bytes in, bytes or floats out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowering.regions.quantized import FLOAT, QuantizedLayer, Takes, finished, weight_of
from lowering.regions.weights import Stays, under_cast

aten = torch.ops.aten

_ROWS = Takes(
    activations=frozenset(
        {"relu", "clamp", "hardswish", "silu", "gelu_erf", "gelu_tanh", "leaky_relu", "tanh"}
    ),
    behind_a_sum=frozenset({"relu"}),
    adds=True,
    floats_to_bytes=True,
)


def find(graph: fx.Graph, stays: Stays) -> Iterator[QuantizedLayer]:
    for node in list(graph.nodes):
        match = _core(node, stays)
        whole = None if match is None else finished(match, _ROWS)
        if whole is not None:
            yield whole


def _core(node: fx.Node, stays: Stays) -> QuantizedLayer | None:
    given: Any = node.args
    bias = None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, *given = given
    elif node.target is not aten.mm.default:
        return None
    x, right = given
    weight = weight_of(right, stays)
    if weight is None or weight.node.meta["val"].dim() != 2:
        return None
    if weight.axis not in (None, 0 if weight.turned else 1):
        return None
    bias = under_cast(bias)
    if bias is not None and bias.meta["val"].dim() != 1:
        return None
    return QuantizedLayer(
        "quantized_linear",
        node,
        x,
        FLOAT,
        weight.node,
        weight.step,
        weight.zero,
        bias,
        in_out=not weight.turned,
    )
