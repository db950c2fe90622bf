"""Linear layers of more than two dimensions, which ATen flattens to a matrix and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from lowering.graphs import only_user, same_sizes

aten = torch.ops.aten

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Layer(Protocol):
    """A match; the first two are fields of a dataclass."""

    @property
    def node(self) -> fx.Node: ...

    @property
    def input(self) -> fx.Node: ...

    @property
    def outputs(self) -> Any: ...


AnyLayer = TypeVar("AnyLayer", bound=Layer)


def in_full_rank(match: AnyLayer) -> AnyLayer:
    """Without the flattening to a matrix before it and the view back behind it."""
    user = only_user(match.node)
    if user is None or user.target not in VIEWS or "val" not in user.meta:
        return match
    before, after = match.input.meta["val"], user.meta["val"]
    if not same_sizes(after.shape[-1:], (match.outputs,)):
        return match
    if same_sizes(before.shape[:-1], after.shape[:-1]):
        return replace(match, node=user)  # type: ignore[type-var]
    flattened: Any = match.input
    if flattened.target not in VIEWS:
        return match
    full: Any = flattened.args[0]
    inner = before.shape[-1:]
    if not same_sizes(full.meta["val"].shape, (*after.shape[:-1], *inner)):
        return match
    return replace(match, node=user, input=full)  # type: ignore[type-var]
