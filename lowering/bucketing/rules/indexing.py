"""Reading at positions that are data. Padding among the positions reads position 0."""

from __future__ import annotations

import torch

from lowering.bucketing.bucket import require_prefix, require_static
from lowering.bucketing.call import Call
from lowering.bucketing.layout import Dim, Padded, broadcast, is_prefix, is_static
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule


@rule("aten.embedding.default")
def embedding(call: Call) -> Padded:
    table, index = call["weight"], call["indices"]
    require_prefix(table, 0)
    return Padded(call.run(indices=call.filled(0, index)), index.dims + table.dims[1:])


@rule("aten.index_select.default")
def index_select(call: Call) -> Padded:
    x, index, place = call["self"], call["index"], call.dim()
    require_prefix(x, place)
    dims = x.dims[:place] + index.dims + x.dims[place + 1 :]
    return Padded(call.run(index=call.filled(0, index)), dims)


@rule("aten.gather.default")
def gather(call: Call) -> Padded:
    x, index, place = call["self"], call["index"], call.dim()
    require_prefix(x, place)
    for dim, (own, its) in enumerate(zip(x.dims, index.dims, strict=True)):
        # Positions may be fewer than data are; the first ones of both are valid.
        if dim != place and own != its and not (is_prefix(own) and is_prefix(its)):
            raise Refused("positions and data are padded differently")
    return Padded(call.run(index=call.filled(0, index)), index.dims)


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def scatter(call: Call) -> Padded:
    """Rows for themselves: what padded rows write stays in padded rows."""
    x, index, source, place = call["self"], call["index"], call.get("src"), call.dim()
    for operand in filter(None, (x, index, source)):
        require_static(operand, [place])
        for dim in range(len(x.dims)):
            if dim != place and operand.dims[dim] != x.dims[dim]:
                raise Refused("positions and data are padded differently")
    return Padded(call.run(index=call.filled(0, index)), x.dims)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Padded:
    """Positions may be negative here: they count from the true end."""
    x = call["self"]
    given = {place: one for place, one in enumerate(call["indices"]) if one is not None}
    ready: list[torch.Tensor | None] = [None] * len(call["indices"])
    for place, one in given.items():
        if one.tensor.dtype in (torch.bool, torch.uint8):
            raise Refused("how much a mask picks depends on the data")
        require_prefix(x, place)
        positions = one.tensor
        if not is_static(x.dims[place]):
            positions = call.bucket.from_start(x, place, positions)
        ready[place] = call.bucket.filled(
            "index", 0, Padded(positions, one.dims), range(len(one.dims))
        )
    return Padded(call.run(indices=ready), _indexed(call, x, given))


def _indexed(call: Call, x: Padded, given: dict[int, Padded]) -> tuple[Dim, ...]:
    """Adjacent positions put their own dimensions where they stand, others to the front."""
    places = sorted(given)
    left = [dim for place, dim in enumerate(x.dims) if place not in given]
    rank = max(len(one.dims) for one in given.values())
    adjacent = places == list(range(places[0], places[-1] + 1))
    front = places[0] if adjacent else 0
    shape = call.shape[front : front + rank]
    own = broadcast(shape, [one.dims for one in given.values()])
    return (*left[:front], *own, *left[front:])
