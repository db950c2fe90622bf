"""Regions of the graph as Dynamo captured it: the same for inference and training, O1 and O2.

What is put in their place is differentiable: torch's own operators or ours with a gradient of their
own, so that autograd, Inductor and every later region see an ordinary graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import fx

from lowering import observing, providers
from lowering.capability import CapabilityRow, Situation, Work, check
from lowering.contract import Graph, Region, RegionMaker, Request
from lowering.graphs import hint, place
from lowering.regions import (
    attention_call,
    cross_entropy,
    einsum,
    library_calls,
    linear_call,
    recurrent,
    resampling,
)
from lowering.regions.epilogue import Epilogue


class Match(Protocol):
    """`absorbed` are the nodes before `node` that it makes superfluous, last one first."""

    @property
    def node(self) -> fx.Node: ...

    @property
    def absorbed(self) -> Sequence[fx.Node]: ...

    def work(self) -> Work: ...


# A loss with the layer before it comes before the loss alone.
_REGIONS = {
    "einsum": einsum.find,
    "attention": attention_call.find,
    "linear_cross_entropy": cross_entropy.find_with_linear,
    "cross_entropy": cross_entropy.find,
    "linear": linear_call.find,
    "convolution": library_calls.find_convolutions,
    "embedding": library_calls.find_embeddings,
    "resampling": resampling.find,
    "recurrent": recurrent.find,
}


def lower(request: Request) -> tuple[Request, list[Region]]:
    """Changes the request's graph; returns the request without the rows that were asked here."""
    early = [row for row in request.region_rows if row.early]
    if not early:
        return request, []
    taken: dict[tuple[str, str], Region] = {}
    matches: dict[tuple[str, str], list[Match]] = {}
    for match, row, maker in list(_choices(request, early)):
        key = (row.region, row.provider)
        region = taken.setdefault(key, _region(row, match, maker))
        region.one_more(row.why)
        matches.setdefault(key, []).append(match)
        if maker.emit is not None:
            _replace(request.graph.graph, match, maker)
            _note_packing(region, match, maker)
        region.detail = maker.describe(matches[key])
    if any(not region.left for region in taken.values()):
        request.graph.recompile()
    rest = tuple(row for row in request.region_rows if not row.early)
    return replace(request, region_rows=rest), list(taken.values())


def _choices(
    request: Request, early: Sequence[CapabilityRow]
) -> Iterator[tuple[Match, CapabilityRow, RegionMaker]]:
    """Each match with the first row that takes it; no node belongs to two."""
    gone: set[fx.Node] = set()
    for name, find in _REGIONS.items():
        rows = [row for row in early if row.region == name]
        for match in _found(find, request.graph.graph) if rows else ():
            row = next((row for row in rows if _takes(row, match, request)), None)
            if row is not None and gone.isdisjoint({match.node, *match.absorbed}):
                gone |= {match.node, *match.absorbed}
                yield match, row, providers.maker(row)


def _region(row: CapabilityRow, match: Match, maker: RegionMaker) -> Region:
    left, at = maker.emit is None, place(match.node)
    return Region(row.region, row.provider, 0, at, left=left, silent=maker.silent)


def _note_packing(region: Region, match: Match, maker: RegionMaker) -> None:
    """For the few regions here that have weights; most are torch's own calls."""
    weights = [weight.meta["example_value"] for weight in getattr(match, "weights", ())]
    element = maker.packed_element(match) if weights else 0
    if element:
        region.packed_bytes += element * sum(hint(weight.numel()) for weight in weights)
        widened = element > weights[0].dtype.itemsize
        region.recipes = ("prepack", "widen-weight") if widened else ("prepack",)


def _found(find: Any, graph: fx.Graph) -> Iterable[Match]:
    return find(graph)


def _takes(row: CapabilityRow, match: Match, request: Request) -> bool:
    """Machine and wish were asked when the rows were chosen; here only the work is in question."""
    situation = Situation(level=request.level, features=row.features)
    return not check(row, match.work(), situation) and not providers.maker(row).refuses(match)


def _replace(graph: fx.Graph, match: Match, maker: RegionMaker) -> None:
    assert maker.emit is not None
    with graph.inserting_before(match.node):
        new = maker.emit(graph, match, Epilogue(match.node))
    assert isinstance(new, fx.Node), "calls have one result"
    new.meta = dict(match.node.meta)
    match.node.replace_all_uses_with(new)
    for node in (match.node, *match.absorbed):
        if not node.users:
            graph.erase_node(node)


def counted(run: Graph, regions: Sequence[Region]) -> Graph:
    """No operator tells that silent regions ran: they do whenever the graph does."""
    counting = [region for region in regions if region.silent and not region.backward]
    if not counting:
        return run

    def call(*args: Any) -> Any:
        result = run(*args)
        for region in counting:
            observing.region_ran(region.name, region.provider, region.count)
        return result

    return call
