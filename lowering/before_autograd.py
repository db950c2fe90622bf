"""Regions of the graph as Dynamo captured it: the same for inference and training, O1 and O2.

What is put in their place is made of torch's own operators, so that autograd, Inductor and every
later region see an ordinary graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from lowering import observing, providers
from lowering.capability import CapabilityRow, Situation, check
from lowering.contract import Graph, Region, RegionMaker, Request
from lowering.graphs import place
from lowering.regions import einsum
from lowering.regions.epilogue import Epilogue


def lower(request: Request) -> tuple[Request, list[Region]]:
    """Changes the request's graph; returns the request without the rows that were asked here."""
    rows = [row for row in request.region_rows if row.region == "einsum"]
    if not rows:
        return request, []
    graph = request.graph.graph
    taken: dict[str, Region] = {}
    flops: dict[str, list[int]] = {}
    for match in einsum.find(graph):
        chosen = _choose(match, rows, request)
        if chosen is not None:
            name, maker = chosen
            new = _replace(graph, match, maker)
            region = taken.setdefault(name, Region("einsum", name, 0, place(new)))
            region.count += 1
            before, after = flops.setdefault(name, [0, 0])
            flops[name] = [before + match.work().flops, after + match.cost(_path_of(new))[0]]
    for name, region in taken.items():
        before, after = flops[name]
        region.detail = f"ordered: {after / 1e6:.3g} MFLOP instead of {before / 1e6:.3g}"
    if taken:
        request.graph.recompile()
    rest = tuple(row for row in request.region_rows if row.region != "einsum")
    return replace(request, region_rows=rest), list(taken.values())


def _path_of(node: fx.Node) -> einsum.Path:
    steps: Any = node.kwargs["path"]
    return list(zip(steps[::2], steps[1::2], strict=True))


def _choose(
    match: einsum.Einsum, rows: Sequence[CapabilityRow], request: Request
) -> tuple[str, RegionMaker] | None:
    for row in rows:
        maker = providers.get(row.provider).regions[row.region]
        situation = Situation(level=request.level, features=row.features)
        if not check(row, match.work(), situation) and not maker.refuses(match):
            return row.provider, maker
    return None


def _replace(graph: fx.Graph, match: einsum.Einsum, maker: RegionMaker) -> fx.Node:
    with graph.inserting_before(match.node):
        new = maker.emit(graph, match, Epilogue(match.node))
    new.meta = dict(match.node.meta)
    match.node.replace_all_uses_with(new)
    graph.erase_node(match.node)
    return new


def counted(run: Graph, regions: Sequence[Region]) -> Graph:
    """No operator of ours is left to say that these ran: they do whenever the graph does."""
    if not regions:
        return run

    def call(*args: Any) -> Any:
        result = run(*args)
        for region in regions:
            observing.region_ran(region.name, region.provider, region.count)
        return result

    return call
