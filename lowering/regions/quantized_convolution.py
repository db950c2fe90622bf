"""The quantized_convolution region: bytes in, bytes or floats out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from lowering.regions.convolution import for_each
from lowering.regions.quantized import FLOAT, QuantizedLayer, Takes, finished, weight_of
from lowering.regions.weights import Stays, under_cast

aten = torch.ops.aten

_IMAGES = Takes(
    activations=frozenset({"relu", "clamp", "hardswish", "silu"}),
    behind_a_sum=frozenset({"relu"}),
    adds=True,
    floats_to_bytes=False,
)
_LINES = replace(_IMAGES, activations=frozenset({"relu"}), adds=False)
_VOLUMES = replace(_LINES, activations=frozenset())
_TAKES = {1: _LINES, 2: _IMAGES, 3: _VOLUMES}


def find(graph: fx.Graph, stays: Stays) -> Iterator[QuantizedLayer]:
    for node in list(graph.nodes):
        match = _core(node, stays)
        dims = len(match.geometry[0]) if match is not None else 0
        whole = None if match is None else finished(match, _TAKES[dims])
        if whole is not None and whole.grid.is_fixed:
            yield whole


def _core(node: fx.Node, stays: Stays) -> QuantizedLayer | None:
    if node.target is not aten.convolution.default:
        return None
    input, right, bias, stride, padding, dilation, transposed, _, groups = node.args
    weight = weight_of(right, stays)
    if weight is None or transposed or weight.turned or weight.axis not in (None, 0):
        return None
    given = weight.node.meta["val"]
    if given.dim() != node.meta["val"].dim():
        return None  # a single image without a batch
    spatial = tuple(tuple(for_each(one, weight.node)) for one in (stride, padding, dilation))
    return QuantizedLayer(
        "quantized_convolution",
        node,
        input,  # type: ignore[arg-type]
        FLOAT,
        weight.node,
        weight.step,
        weight.zero,
        under_cast(bias),
        geometry=(*spatial, groups),
    )
