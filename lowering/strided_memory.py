"""Layouts and `as_strided` for devices that take all memory to be laid out row by row.

AOTAutograd uses it for inputs that share memory and are written into. XLA's own kernel gives the
wrong elements as soon as some are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowering.graphs import hint, place

_aten = torch.ops.aten


def _places(
    x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any
) -> torch.Tensor:
    places = torch.full((), 0 if offset is None else offset, dtype=torch.int64, device=x.device)
    for length, step in zip(size, stride, strict=True):
        along = torch.arange(length, device=x.device) * step
        places = places.unsqueeze(-1) + along
    return places


def _as_strided(
    x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    if not lies_row_by_row(x):
        return NotImplemented
    return x.reshape(-1)[_places(x, size, stride, storage_offset)]


def _as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> Any:
    if not lies_row_by_row(x):
        return NotImplemented
    places = _places(x, size, stride, storage_offset)
    return x.reshape(-1).index_put((places,), src).reshape(x.shape)


def lies_row_by_row(x: torch.Tensor) -> bool:
    """In memory that starts with it, as traced."""
    return x.is_contiguous() and hint(x.storage_offset()) == 0


RULES: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}


def order_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of what does not lie row by row, outermost first; else None."""
    strides = [hint(stride) for stride in value.stride()]
    sizes = [hint(size) for size in value.shape]
    order = sorted(range(value.dim()), key=lambda i: (-strides[i], -sizes[i], i))
    large = [i for i in order if sizes[i] != 1]
    return None if large == sorted(large) else tuple(order)


def laid_out(value: Any, order: tuple[int, ...] | None) -> Any:
    """What comes home lies row by row. AOTAutograd and the code behind the graph rely on the layout
    that was traced: they take views of it."""
    if order is None or not isinstance(value, torch.Tensor) or value.dim() != len(order):
        return value
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)


def demand_plain_memory(module: fx.GraphModule) -> None:
    """`as_strided` looks at memory, and XLA takes all memory to be laid out row by row."""
    for node in module.graph.nodes:
        if "as_strided" not in str(node.target) or not node.all_input_nodes:
            continue
        values = [one.meta.get("val") for one in node.all_input_nodes]
        for value in (one for one in values if isinstance(one, torch.Tensor)):
            plain = order_of(value) is None and not hint(value.storage_offset())
            if not plain:
                at = place(node)
                raise NotImplementedError(
                    f"{node.target} of a tensor that does not lie row by row in memory of its own"
                    + (f" ({at})" if at else "")
                )
