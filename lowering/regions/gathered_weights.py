"""Products with weights that were looked up by number, `weight[chosen]`, one for each row: how few
tokens of a mixture of experts are often computed. The looked up weights are a copy of all that is
read, which no product needs.

What was looked up reaches the product by way of views. Each of its dimensions is followed as a list
of parts: the dimensions of `chosen`, by number, and the weight's own two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.graphs import same_sizes
from lowering.regions.flattened import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class Gathered:
    """rows[i // (numbers of chosen / rows)] @ weight[chosen[i]]"""

    rows: tuple[fx.Node, int]  # a batch of matrices, and which dimension is the row's 1
    weight: fx.Node
    chosen: fx.Node
    in_out: bool


@dataclass(frozen=True)
class _Part:
    size: Any
    of_chosen: int = -1  # which of its dimensions
    of_weight: int = -1


_Dims = list[list[_Part]]


def gathered(product: fx.Node) -> Gathered | None:
    """Of a batched product, whose batch are rows."""
    if product.target is not aten.bmm.default:
        return None
    operands: Any = product.args
    for side in (0, 1):
        source, dims = _followed(operands[side])
        other = operands[1 - side]
        if source is None or not same_sizes(other.meta["val"].shape[2 - side : 3 - side], (1,)):
            continue
        batch, *matrix = dims
        inner, outer = matrix[::-1] if side == 0 else matrix
        inner_at = _only_part_of_weight(inner)
        weight, (chosen,) = source.args
        if inner_at is None or not _in_order([*batch, *outer], chosen, 1 - inner_at):
            continue
        if isinstance(product.meta["val"].shape[1 + side], int):
            return Gathered((other, 2 - side), weight, chosen, in_out=inner_at == 0)
    return None


def _only_part_of_weight(dim: list[_Part]) -> int | None:
    return dim[0].of_weight if len(dim) == 1 and dim[0].of_weight >= 0 else None


def _in_order(parts: Sequence[_Part], chosen: fx.Node, outer: int) -> bool:
    """All dimensions of `chosen`, then the outputs of the weight."""
    wanted = [*range(chosen.meta["val"].dim()), outer]
    *firsts, last = parts or [_Part(1)]
    return [part.of_chosen for part in firsts] + [last.of_weight] == wanted


def _followed(node: Any) -> tuple[Any, _Dims]:
    """The lookup that this is a view of, and what its dimensions have become; or (None, [])."""
    views: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in _VIEWED:
        views.append(node)
        node = node.args[0]
    # What is looked up for others, too, may as well be read.
    alone = isinstance(node, fx.Node) and all(len(one.users) == 1 for one in (node, *views))
    if not alone or not _is_lookup(node):
        return None, []
    dims = _looked_up(node)
    for view in reversed(views):
        found = _VIEWED[view.target](dims, view)
        if found is None:
            return None, []
        dims = found
    return (node, dims) if len(dims) == 3 else (None, [])


def _is_lookup(node: fx.Node) -> bool:
    if node.target is not aten.index.Tensor:
        return False
    given: Any = node.args
    weight, numbers = given
    if len(numbers) != 1 or numbers[0] is None:
        return False
    of_weight, of_numbers = weight.meta["val"], numbers[0].meta["val"]
    whole = of_numbers.dtype in (torch.int64, torch.int32) and of_numbers.dim() > 0
    return whole and of_weight.dim() == 3


def _looked_up(node: fx.Node) -> _Dims:
    *of_chosen, first, second = node.meta["val"].shape
    chosen = [[_Part(size, of_chosen=i)] for i, size in enumerate(of_chosen)]
    return [*chosen, [_Part(first, of_weight=0)], [_Part(second, of_weight=1)]]


# --- what a view makes of dimensions; None: nothing that is followed ------------------------------


def _permuted(dims: _Dims, view: fx.Node) -> _Dims | None:
    order: Any = view.args[1]
    return [dims[i] for i in order]


def _exchanged(dims: _Dims, view: fx.Node) -> _Dims | None:
    one, other = (int(dim) for dim in view.args[1:])  # type: ignore[arg-type]
    result = list(dims)
    result[one], result[other] = dims[other], dims[one]
    return result


def _widened(dims: _Dims, view: fx.Node) -> _Dims | None:
    at: Any = view.args[1]
    at = at if at >= 0 else at + len(dims) + 1
    return [*dims[:at], [], *dims[at:]]


def _narrowed(dims: _Dims, view: fx.Node) -> _Dims | None:
    gone: Any = view.args[1]
    gone = {dim % len(dims) for dim in ([gone] if isinstance(gone, int) else gone)}
    kept = [dim for i, dim in enumerate(dims) if i not in gone]
    return kept if all(not dims[i] for i in gone) else None


def _same(dims: _Dims, view: fx.Node) -> _Dims | None:
    source: Any = view.args[0]
    return dims if same_sizes(view.meta["val"].shape, source.meta["val"].shape) else None


def _viewed(dims: _Dims, view: fx.Node) -> _Dims | None:
    """The same parts in the same order, in other groups."""
    left = [part for dim in dims for part in dim]
    result: _Dims = []
    for size in view.meta["val"].shape:
        taken: list[_Part] = []
        while not same_sizes((math.prod(part.size for part in taken),), (size,)):
            if not left:
                return None
            taken.append(left.pop(0))
        result.append(taken)
    return None if left else result


_VIEWED: dict[Any, Callable[[_Dims, fx.Node], _Dims | None]] = {
    aten.permute.default: _permuted,
    aten.transpose.int: _exchanged,
    aten.unsqueeze.default: _widened,
    aten.squeeze.dim: _narrowed,
    aten.squeeze.dims: _narrowed,
    aten.expand.default: _same,
    aten.clone.default: _same,
    **dict.fromkeys(VIEWS, _viewed),
}
