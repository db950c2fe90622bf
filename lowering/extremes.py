"""Numbers that are compared with the largest or smallest of them: computed once.

Inductor computes cheap functions where they are read, so for a maximum and again for the comparison
with it. The two may differ: half-precision numbers are rounded where they are stored only, and the
end of a line that fills no vector is computed by other functions than the rest. Then `z ==
z.amax()` holds nowhere, and the gradient of the maximum, which looks for its places, is 0/0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowering import overwritten
from lowering.outputs import is_view

aten = torch.ops.aten
_COMPARISONS = (aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt)
_EXTREMES = (aten.amax, aten.amin, aten.max, aten.min, aten.aminmax)


def put_right(graph: fx.Graph) -> None:
    """Have both read what one loop has written."""
    for node in [*graph.nodes]:
        if (source := _compared_with_its_extreme(node)) is not None:
            overwritten.read_copied(graph, source)


def _compared_with_its_extreme(node: fx.Node) -> fx.Node | None:
    if getattr(node.target, "overloadpacket", None) not in _COMPARISONS:
        return None
    sides = [_behind_views(arg) for arg in node.args]
    for one, other in (sides, sides[::-1]) if len(sides) == 2 else ():
        if one is not None and other is not None and _source_of_extreme(other) is one:
            return one if _may_be_computed_twice(one) else None
    return None


def _source_of_extreme(node: fx.Node) -> fx.Node | None:
    if node.target is operator.getitem:
        (node,) = node.all_input_nodes
    if (
        getattr(node.target, "overloadpacket", None) not in _EXTREMES
        or len(node.all_input_nodes) != 1
    ):
        return None
    return _behind_views(node.args[0])


def _behind_views(node: Any) -> fx.Node | None:
    while isinstance(node, fx.Node) and is_view(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node if isinstance(node, fx.Node) else None


def _may_be_computed_twice(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not overwritten.COPIED
