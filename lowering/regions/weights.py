"""Weights that stay from call to call, as region matchers see them in an ATen graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Stays:
    """The graph inputs that are parameters or buffers."""

    names: Collection[str]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node.op == "placeholder" and node.name in self.names

    def or_none(self, node: object) -> bool:
        """An optional argument: absent, or one that stays."""
        return node is None or node in self


def under_cast(node: Any) -> Any:
    """What stands under a conversion of dtype: autocast puts one between a weight and its use.

    One conversion between floating dtypes only: packing does that one as well. A second one, or
    one through integers, rounds in a way that is the user's.
    """
    convert = torch.ops.prims.convert_element_type.default
    if not isinstance(node, fx.Node) or not (
        node.target is convert
        or (node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"})
    ):
        return node
    source: Any = node.args[0]
    if "val" not in source.meta:  # a region in half precision, which is no weight
        return node
    dtypes = (source.meta["val"].dtype, node.meta["val"].dtype)
    return source if all(dtype.is_floating_point for dtype in dtypes) else node


def transposed_from(node: Any) -> Any:
    """The matrix whose transpose this is, or None."""
    if not isinstance(node, fx.Node):
        return None
    is_transpose = (
        node.target is aten.t.default
        or (node.target is aten.permute.default and node.args[1] == [1, 0])
        or (node.target is aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-1, -2}))
    )
    return node.args[0] if is_transpose else None
