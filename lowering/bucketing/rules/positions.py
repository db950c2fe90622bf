"""Parts of tensors, and tensors made of parts: where positions along a padded dimension change.

A result whose positions begin elsewhere than the operand's is picked by position, with positions
that are computed from the true lengths when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch

from lowering.bucketing.bucket import require_prefix
from lowering.bucketing.call import Call, Known
from lowering.bucketing.expressions import Expr, Integer, same
from lowering.bucketing.layout import Dim, Padded, dim_of, is_static, size_of
from lowering.bucketing.refused import Refused
from lowering.bucketing.rules.table import rule


@rule("aten.slice.Tensor")
def slice_(call: Call) -> Padded:
    x, place, step = call.x, call.dim(), int(call["step"])
    size, part = size_of(x.dims[place]), call.shape[place]
    if step == 1 and same(size, part):
        return x
    require_prefix(x, place)
    dims = x.dims[:place] + (dim_of(part),) + x.dims[place + 1 :]
    start = _start(call, size)
    length, there = call.bucket.size(part), x.tensor.shape[place]
    if isinstance(start, int) and start + (length - 1) * step < there:
        end = start + (length - 1) * step + 1
        return Padded(torch.ops.aten.slice.Tensor(x.tensor, place, start, end, step), dims)
    # It starts at a position that varies, or its bucket ends behind a table of fixed length.
    positions = start + step * call.bucket.positions(part, x.tensor)
    return Padded(call.bucket.picked(x, place, positions), dims)


def _start(call: Call, size: Expr) -> Any:
    """Where a slice starts, as Python reads it: an int where that is fixed, else a tensor."""
    start = Integer(0) if call["start"] is None else call.expr("start")
    if start.is_Integer and start < 0:
        start = start + size
        if not start.is_Integer:  # further back than the tensor is long means from its start
            true = call.bucket.true(start)
            return true.clamp(min=0)
    if start.is_Integer:
        return max(int(start), 0)
    true = call.bucket.true(start)
    return torch.where(true < 0, true + call.bucket.true(size), true).clamp(min=0)


@rule("aten.select.int")
def select(call: Call) -> Padded:
    x, place, index = call.x, call.dim(), call.expr("index")
    dims = x.dims[:place] + x.dims[place + 1 :]
    static = is_static(x.dims[place])
    require_prefix(x, place)
    if index.is_Integer and (index >= 0 or static):
        return Padded(call.run(), dims)
    position = torch.as_tensor(call.bucket.true(index), device=x.tensor.device)
    true = call.bucket.from_start(x, place, position)
    return Padded(call.bucket.picked(x, place, true.reshape(1)).squeeze(place), dims)


@rule("aten.cat.default")
def cat(call: Call) -> Padded:
    parts: list[Padded] = list(call.tensors())
    place = call.dim()
    for other in parts[1:]:
        if _other_dims(other, place) != _other_dims(parts[0], place):
            raise Refused("what it puts together is padded differently")
    for part in parts:
        require_prefix(part, place)
    joined = Padded(
        torch.cat([part.tensor for part in parts], place),
        (*parts[0].dims[:place], dim_of(call.shape[place]), *parts[0].dims[place + 1 :]),
    )
    if all(is_static(part.dims[place]) for part in parts[:-1]):
        return joined
    return Padded(_closed_up(call, joined, parts, place), joined.dims)


def _other_dims(x: Padded, place: int) -> tuple[Dim, ...]:
    return x.dims[:place] + x.dims[place + 1 :]


def _closed_up(call: Call, joined: Padded, parts: list[Padded], place: int) -> torch.Tensor:
    """Each part follows the valid end of the one before it."""
    position = call.bucket.positions(call.shape[place], joined.tensor)
    source, end, there = position, Integer(0), 0
    for part in parts[:-1]:
        end, there = end + size_of(part.dims[place]), there + part.tensor.shape[place]
        begins = call.bucket.true(end)
        source = torch.where(position >= begins, position - begins + there, source)
    return call.bucket.picked(joined, place, source)


@rule("aten.stack.default")
def stack(call: Call) -> Padded:
    parts = list(call.tensors())
    place = int(call["dim"]) % len(call.shape)
    if any(part.dims != parts[0].dims for part in parts):
        raise Refused("what it puts together is padded differently")
    dims = parts[0].dims
    return Padded(call.run(), (*dims[:place], dim_of(call.shape[place]), *dims[place:]))


@rule("aten.constant_pad_nd.default")
def pad(call: Call) -> Padded:
    """Behind a padded end stands what the operator pads with, so it only moves."""
    x, amounts, dims = call.x, list(call["pad"]), list(call.x.dims)
    changed = [len(dims) - 1 - pair for pair in range(len(amounts) // 2)]
    for pair, place in enumerate(changed):
        given = amounts[2 * pair : 2 * pair + 2]
        if given != [0, 0]:
            require_prefix(x, place)
            dims[place] = dim_of(call.shape[place])
    if any(isinstance(amount, Known) for amount in amounts):
        raise Refused("it pads by a number that is made of sizes")
    touched = [place for pair, place in enumerate(changed) if any(amounts[2 * pair :][:2])]
    return Padded(call.run(self=call.filled(0, x, touched, given=call["value"])), tuple(dims))


@rule("aten.slice_scatter.default")
def slice_scatter(call: Call) -> Padded:
    """Padding of what is written lands in padding only if it is written up to the end."""
    x, source, place = call["self"], call["src"], call.dim()
    if _other_dims(x, place) != _other_dims(source, place):
        raise Refused("what it writes is padded differently")
    if is_static(x.dims[place]) and is_static(source.dims[place]):
        return Padded(call.run(), x.dims)
    require_prefix(x, place)
    require_prefix(source, place)
    start = Integer(0) if call["start"] is None else call.expr("start")
    size, part = size_of(x.dims[place]), size_of(source.dims[place])
    to_the_end = same(start + part, size)
    if not (start.is_Integer and start >= 0) or call["step"] != 1:
        raise Refused("it writes to positions that vary")
    if not (to_the_end or part.is_Integer):
        raise Refused("it writes a padded part into the middle")
    end = int(start) + source.tensor.shape[place]
    return Padded(call.run(start=int(start), end=end), x.dims)


@rule("aten.select_scatter.default")
def select_scatter(call: Call) -> Padded:
    x, source, place = call["self"], call["src"], call.dim()
    if _other_dims(x, place) != source.dims:
        raise Refused("what it writes is padded differently")
    index = call.expr("index")
    require_prefix(x, place)
    if not index.is_Integer or (index < 0 and not is_static(x.dims[place])):
        raise Refused("it writes to a position that varies")
    return Padded(call.run(), x.dims)
