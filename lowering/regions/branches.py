"""Convolutions of one image whose results are summed up, found where Dynamo sees them.

RepVGG, MobileOne, RepViT and networks of large kernels are trained in branches: kernels of several
sizes, and a BatchNorm of the image itself, which is a kernel of one pixel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowering import writing
from lowering.graphs import same_sizes
from lowering.regions.branch import CONVOLUTIONS, FLOATS, PRODUCTS, Branch, Merge, merged, read
from lowering.regions.calls import has_transforms, name_of, value_of

_IN_PLACE = ("add_", "iadd", "__iadd__")
_SUMS = ("add", "__add__", "__radd__", *_IN_PLACE)


@dataclass
class Sum:
    node: fx.Node
    merges: list[Merge] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)  # what else is in it
    nodes: list[fx.Node] = field(default_factory=list)  # that compute it from its terms

    def gone(self) -> set[fx.Node]:
        """What nobody needs any more."""
        merged = [branch for merge in self.merges for branch in merge.branches]
        return {*self.nodes, *(node for branch in merged for node in branch.nodes)}


def find(module: fx.GraphModule, weights: Collection[str]) -> list[Sum]:
    """`weights`: the names of the inputs that stay what they are from call to call."""
    graph = module.graph
    nodes = [node for node in graph.nodes if name_of(node) in _SUMS]
    if not nodes or has_transforms(graph) or _casts(graph):
        return []
    written = writing.written_storages(module)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name in weights]
    stays = {node for node in inputs if not _shared(writing.storages([node]), written)}
    found: list[Sum] = []
    within: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in within and (terms := _terms(node)) is not None:
            one = _sum(node, terms, stays)
            within.update(one.nodes)
            if one.merges and _lies_alike(one) and not _is_written_meanwhile(one):
                found.append(one)
    return found


def _casts(graph: fx.Graph) -> bool:
    """Autocast would have the summed kernels in fewer bits."""
    return torch.is_autocast_enabled("cpu") or any(
        name_of(node) == "_enter_autocast" for node in graph.nodes
    )


# --- sums and their terms -------------------------------------------------------------------------


def _sum(node: fx.Node, terms: Iterable[fx.Node], stays: Collection[fx.Node]) -> Sum:
    result = Sum(node, nodes=[node])
    branches: dict[fx.Node, list[Branch]] = {}
    waiting = list(terms)
    while waiting:
        term = waiting.pop(0)
        inner = _terms(term) if len(term.users) == 1 else None
        if inner is not None:
            result.nodes.append(term)
            waiting[:0] = inner
        elif (branch := read(term, stays)) is not None:
            branches.setdefault(branch.image, []).append(branch)
        else:
            result.others.append(term)
    for image, of_image in branches.items():
        whole = [term for term in result.others if term is image]
        merges, alone = merged([*of_image, *(Branch(image) for _ in whole)])
        result.merges += merges
        result.others = [term for term in result.others if term is not image]
        result.others += [branch.value for branch in alone]
    return result


def _terms(node: fx.Node) -> list[fx.Node] | None:
    """What it adds up, if that is all it does. Zero, from which sums begin, is no term."""
    if name_of(node) not in _SUMS or len(node.args) != 2 or node.kwargs:
        return None
    if writing.is_opaque(node):  # another's function of that name
        return None
    value = value_of(node)
    if value is None or value.dtype not in FLOATS or value.device.type != "cpu":
        return None
    terms: list[Any] = [term for term in node.args if not _is_zero(term)]
    if not all(_fits(term, value) for term in terms):
        return None
    into: Any = node.args[0]
    if name_of(node) in _IN_PLACE and isinstance(into, fx.Node) and not _is_fresh(into):
        return None
    return terms


def _is_zero(term: Any) -> bool:
    return type(term) in (int, float) and term == 0


def _fits(term: Any, value: torch.Tensor) -> bool:
    own = value_of(term)
    return own is not None and own.dtype == value.dtype and same_sizes(own.shape, value.shape)


def _is_fresh(node: fx.Node) -> bool:
    """New memory that one node reads: who writes into that changes nothing else."""
    if len(node.users) != 1 or "out" in node.kwargs or writing.is_opaque(node):
        return False
    into = node.args[0] if name_of(node) in _IN_PLACE else None
    if isinstance(into, fx.Node):
        return _is_fresh(into)
    return name_of(node) in (*_SUMS, *PRODUCTS, *CONVOLUTIONS, "batch_norm")


def _lies_alike(found: Sum) -> bool:
    """Does all that will be summed up lie in memory as the sum does? So will the new one, then."""
    terms = [merge.branches[0].nodes[0] for merge in found.merges] + found.others
    strides = value_of(found.node).stride()
    return all(same_sizes(value_of(term).stride(), strides) for term in terms)


def _is_written_meanwhile(found: Sum) -> bool:
    """Is anything that the sum is made of changed before it is made now?"""
    own = found.gone()
    read = writing.storages(
        [*found.others, *(branch.image for merge in found.merges for branch in merge.branches)]
    )
    node = min(own)
    while node is not found.node:
        if node not in own and _shared(read, writing.storages(writing.maybe_written_by(node))):
            return True
        node = node.next
    return False


def _shared(some: set[int | None], others: set[int | None]) -> bool:
    return bool(some & others - {None})
