"""Sizes that a graph has as the number in a tensor: `pad(x, (0, missing))`, where `missing` is one.

Dynamo writes them down as they are, and nothing that traces the graph below knows the number. Torch
runs such a graph call by call (padding in Mimi and its family, enlarged position embeddings).
"""

from __future__ import annotations

from torch import fx

from lowering.regions.calls import name_of, value_of

KIND = "sizes that are tensors"  # as an op that capability rows refuse
_CALLS = ("pad", "interpolate")


def has_them(node: fx.Node) -> bool:
    """All that these calls are given behind their first tensor are sizes, or say how."""
    if name_of(node) not in _CALLS:
        return False
    return any(value_of(given) is not None for given in node.all_input_nodes[1:])
