"""The linear region: `x @ weight.T (+ bias)` with a weight that stays, in an ATen graph.

Hand-written modules match as well as nn.Linear, because both have become mm or addmm here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import CapabilityRow, Situation, Work, check
from lowering.contract import Region
from lowering.graphs import place

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """One match: the node to replace, and what it computes."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node  # (out, in), a graph input that does not change from call to call
    bias: fx.Node | None


def find(graph: fx.Graph, stays: Collection[str]) -> Iterator[Linear]:
    """Matches whose weight is one of the graph inputs named in `stays`."""
    for node in graph.nodes:
        if node.target is aten.mm.default:
            left, right, bias = node.args[0], node.args[1], None
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
        else:
            continue
        weight = _transposed_from(right)
        if weight is None or weight.name not in stays:
            continue
        if bias is None or (bias.name in stays and bias.meta["val"].dim() == 1):
            yield Linear(node, left, weight, bias)


def _transposed_from(node: fx.Node) -> fx.Node | None:
    """The graph input whose transpose this is."""
    is_transpose = node.target is aten.t.default or (
        node.target is aten.permute.default and node.args[1] == [1, 0]
    )
    if not is_transpose or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if node.args[0].op == "placeholder" else None


def work_of(match: Linear) -> Work:
    value, weight = match.node.meta["val"], match.weight.meta["val"]
    sizes = [_hint(size) for size in (*value.shape, weight.shape[1])]
    return Work(
        region="linear",
        dtypes=frozenset({str(value.dtype).removeprefix("torch.")}),
        op_count=1,
        flops=2 * math.prod(sizes),
        dynamic=any(not isinstance(size, int) for size in value.shape),
    )


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def lower(
    graph: fx.Graph, rows: Collection[CapabilityRow], situation: Situation, stays: Collection[str]
) -> list[Region]:
    """Replace the matches that a row takes by that row's provider; the rest stay as they are."""
    taken: dict[str, Region] = {}
    for match in list(find(graph, stays)):
        row = next((row for row in rows if not check(row, work_of(match), situation)), None)
        if row is None:
            continue
        _replace(graph, match)
        region = taken.setdefault(
            row.provider, Region("linear", row.provider, 0, place(match.node))
        )
        region.count += 1
    if taken:
        graph.eliminate_dead_code()
    return list(taken.values())


def _replace(graph: fx.Graph, match: Linear) -> None:
    with graph.inserting_before(match.node):
        new = graph.call_function(
            torch.ops.kernel_dispatch.mkldnn_linear.default,
            (match.input, match.weight, match.bias),
        )
    new.meta = dict(match.node.meta)
    match.node.replace_all_uses_with(new)
    graph.erase_node(match.node)
