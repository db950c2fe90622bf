"""Neighbours of a head turned into each other: (x0, x1) -> (-x1, x0), as GPT-J and its heirs have
it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowering.graphs import same_sizes

aten = torch.ops.aten
_FLATTEN = (aten.view.default, aten.reshape.default)


def pairs_turned(node: Any) -> Any:
    """x, where this is stack([-x[..., 1::2], x[..., ::2]], -1), flat again; else None."""
    if not isinstance(node, fx.Node) or node.target not in _FLATTEN:
        return None
    parts = _side_by_side(node.args[0])
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    second, of_second = _every_other(parts[0].args[0])
    first, of_first = _every_other(parts[1])
    if (first, second) != (0, 1) or of_first is not of_second:
        return None
    x: Any = of_first
    return x if same_sizes(x.meta["val"].shape, node.meta["val"].shape) else None


def _side_by_side(node: Any) -> list[Any]:
    """What is stacked as a new last dimension, whole or as Inductor takes a stack apart."""
    if not isinstance(node, fx.Node) or not node.args:
        return []
    last = node.meta["val"].dim() - 1
    parts: Any = node.args[0]
    if len(node.args) < 2 or node.args[1] not in (-1, last):
        return []
    if node.target is aten.stack.default:
        return list(parts)
    if node.target is not aten.cat.default:
        return []
    inserted = aten.unsqueeze.default
    if any(one.target is not inserted or one.args[1] not in (-1, last) for one in parts):
        return []
    return [one.args[0] for one in parts]


def _every_other(node: Any) -> tuple[int, Any]:
    """(0, x) for x[..., ::2], (1, x) for x[..., 1::2]: a slice, or a part of pairs."""
    if not isinstance(node, fx.Node):
        return -1, None
    if node.target is aten.slice.Tensor:
        return _of_slice(list(node.args))
    if node.target is operator.getitem:
        return _of_part(list(node.args))
    return -1, None


def _of_slice(args: list[Any]) -> tuple[int, Any]:
    if len(args) != 5:
        return -1, None
    x, dim, begin, end, step = args
    size, last = x.meta["val"].shape[-1], x.meta["val"].dim() - 1
    to_its_end = isinstance(size, int) and isinstance(end, int) and end >= size
    return (begin, x) if dim in (-1, last) and to_its_end and step == 2 else (-1, None)


def _of_part(args: list[Any]) -> tuple[int, Any]:
    """A part of x.unflatten(-1, (-1, 2)).unbind(-1)."""
    parts, which = args
    if not isinstance(parts, fx.Node) or parts.target is not aten.unbind.int:
        return -1, None
    given: list[Any] = list(parts.args)
    pairs, dim = given[0], given[1] if len(given) > 1 else 0
    value = pairs.meta["val"]
    if pairs.target in _FLATTEN and dim in (-1, value.dim() - 1) and value.shape[-1] == 2:
        return which, pairs.args[0]
    return -1, None
