"""Half precision around a float32 kernel: converted in the graph, where Inductor fuses it away."""

from __future__ import annotations

import torch
from torch import fx


def widened(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node in float32; flags (bool) stay what they are."""
    dtype = node.meta["val"].dtype
    return node if dtype in (torch.float32, torch.bool) else _converted(graph, node, torch.float32)


def narrowed(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if dtype is torch.float32 else _converted(graph, node, dtype)


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
