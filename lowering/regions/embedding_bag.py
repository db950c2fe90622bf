"""The embedding_bag region: sums and means of bags of rows, of several tables at once, as
recommendation models read them.

    bags[k] = table_k[numbers_k[begins_k[i] : begins_k[i + 1]]].sum(0)       for each bag i

Tables whose bags are all known before one of them is read are one match: a call of torch's for each
takes longer than to read a row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering import outputs
from lowering.capability import Work
from lowering.graphs import hint, same_sizes
from lowering.regions.weights import Stays

aten = torch.ops.aten

_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_SUM, _MEAN = 0, 1
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Bags:
    """Those of one table."""

    result: fx.Node
    table: fx.Node
    numbers: fx.Node
    begins: fx.Node
    factors: fx.Node | None  # of each number
    padding: int  # the row that is left out; -1: none
    mean: bool
    with_end: bool  # are the begins followed by the last bag's end?

    @property
    def width(self) -> int:
        width = self.table.meta["val"].shape[1]
        assert isinstance(width, int)
        return width

    def is_like(self, other: Bags) -> bool:
        one, two = self.result.meta["val"], other.result.meta["val"]
        return (
            (self.mean, self.with_end) == (other.mean, other.with_end)
            and (self.factors is None) == (other.factors is None)
            and one.dtype == two.dtype
            and same_sizes(one.shape[:1], two.shape[:1])
        )


@dataclass(frozen=True)
class EmbeddingBags:
    tables: Sequence[Bags]

    @property
    def node(self) -> fx.Node:
        """The last of its results: all that is read is there by then."""
        return self.tables[-1].result

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        numbers = [hint(bags.numbers.meta["val"].shape[0]) for bags in self.tables]
        widths = [bags.width for bags in self.tables]
        read = sum(n * width for n, width in zip(numbers, widths, strict=True))
        return Work(
            region="embedding_bag",
            dtypes=frozenset({str(self.dtype).removeprefix("torch.")}),
            op_count=len(self.tables),
            bytes_moved=read * self.dtype.itemsize,
            dynamic=any(not isinstance(size, int) for size in self.node.meta["val"].shape),
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[EmbeddingBags]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    matches: list[list[Bags]] = []
    together: list[Bags] = []
    for bags in filter(None, map(_bags, graph.nodes)):
        if together and bags.is_like(together[0]) and _is_unread(together, bags.result, place):
            together.append(bags)
        else:
            matches.append(together := [bags])
        if outputs.shows(bags.result):  # it has memory of its own
            together.remove(bags)
            matches.append([bags])
    for match in filter(None, matches):
        # Read once more: what one of them reads may have been the result of a match before.
        now = [_bags(bags.result.args[0]) for bags in match]  # type: ignore[arg-type]
        if all(now):
            yield EmbeddingBags(now)  # type: ignore[arg-type]


def _is_unread(together: Sequence[Bags], last: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Does nothing before that result read one of these?"""
    return all(place[user] > place[last] for bags in together for user in bags.result.users)


def _bags(node: fx.Node) -> Bags | None:
    if node.target not in _BAGS or node.kwargs or len(node.users) != 1:
        return None
    (result,) = node.users  # the others are for the backward
    if result.target is not operator.getitem or result.args[1] != 0:
        return None
    given = dict(enumerate(node.args))
    table, numbers, begins = (given[i] for i in range(3))
    mode, factors = given.get(4, _SUM), given.get(6)
    with_end, padding = bool(given.get(7, False)), given.get(8, -1)
    found: Any = (result, table, numbers, begins, factors, padding, mode == _MEAN, with_end)
    return Bags(*found) if mode in (_SUM, _MEAN) and _is_readable(Bags(*found)) else None


def _is_readable(bags: Bags) -> bool:
    table, numbers, begins = (n.meta["val"] for n in (bags.table, bags.numbers, bags.begins))
    _, width = table.shape
    if bags.factors is not None and bags.factors.meta["val"].dtype != table.dtype:
        return False
    return (
        isinstance(width, int)
        and same_sizes(table.stride(), (width, 1))
        and numbers.dtype in _INTEGERS
        and begins.dtype in _INTEGERS
        and numbers.dim() == begins.dim() == 1
    )
