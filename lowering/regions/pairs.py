"""Neighbours of a head turned into each other: (x0, x1) -> (-x1, x0), as GPT-J and its heirs have
it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def pairs_turned(node: Any) -> Any:
    """x, where this is stack([-x[..., 1::2], x[..., ::2]], -1), flat again; else None."""
    if not isinstance(node, fx.Node) or node.target not in (
        aten.view.default,
        aten.reshape.default,
    ):
        return None
    parts = _side_by_side(node.args[0])
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    second, of_second = _every_other(parts[0].args[0])
    first, of_first = _every_other(parts[1])
    if (first, second) != (0, 1) or of_first is not of_second:
        return None
    x: Any = of_first
    same = x.meta["val"].shape == node.meta["val"].shape
    return x if same else None


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
    if any(
        one.target is not aten.unsqueeze.default or one.args[1] not in (-1, last) for one in parts
    ):
        return []
    return [one.args[0] for one in parts]


def _every_other(node: Any) -> tuple[int, Any]:
    """(0, x) for x[..., ::2], (1, x) for x[..., 1::2]: a slice, or a part of pairs."""
    if not isinstance(node, fx.Node):
        return -1, None
    if node.target is aten.slice.Tensor and len(node.args) == 5:
        x, dim, begin, end, step = node.args
        size: Any = x.meta["val"].shape[-1]  # type: ignore[union-attr]
        at_last = dim in (-1, x.meta["val"].dim() - 1)  # type: ignore[union-attr]
        whole = isinstance(size, int) and isinstance(end, int) and end >= size
        return (begin, x) if at_last and whole and step == 2 else (-1, None)  # type: ignore[return-value]
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:  # type: ignore[union-attr]
        pairs, dim = node.args[0].args  # type: ignore[union-attr]
        is_view = pairs.target in (aten.view.default, aten.reshape.default)
        if (
            is_view
            and dim in (-1, pairs.meta["val"].dim() - 1)
            and pairs.meta["val"].shape[-1] == 2
        ):
            return node.args[1], pairs.args[0]  # type: ignore[return-value]
    return -1, None
