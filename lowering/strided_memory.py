"""`as_strided` by indices, for devices that take all memory to be laid out row by row.

AOTAutograd uses it for inputs that share memory and are written into. XLA's own kernel gives the
wrong elements as soon as some are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    from lowering.graphs import hint

    return x.is_contiguous() and hint(x.storage_offset()) == 0


RULES: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}
