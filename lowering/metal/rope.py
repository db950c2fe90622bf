"""Rotary embedding of query and key in one launch, pairs half a head apart or side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.metal import shaders
from lowering.metal.registration import operator

_THREADS = 256  # of one threadgroup


def launch(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`query` and `key` are (batch, heads, tokens, size), the tables (batch or 1, tokens, size)."""
    batch, heads, tokens, size = query.shape
    cos, sin = (table.expand(batch, tokens, size) for table in (cos, sin))
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    pairs = size // 2
    grid = [pairs, heads + key.shape[1], batch * tokens]
    wide = min(pairs, _THREADS)
    shaders.library("rope", NUMBER=query.dtype).rope(
        query,
        key,
        cos,
        sin,
        query_out,
        key_out,
        query.stride(),
        key.stride(),
        query_out.stride(),
        key_out.stride(),
        cos.stride(),
        sin.stride(),
        heads,
        tokens,
        pairs,
        int(interleaved),
        threads=grid,
        group_size=[wide, max(1, min(grid[1], _THREADS // wide)), 1],
    )
    return query_out, key_out


def meaning(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """In plain torch."""
    return _turned(query, cos, sin, interleaved), _turned(key, cos, sin, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    wide, across = x.to(dtype), (x.unflatten(-1, (-1, 2)) if interleaved else x).to(dtype)
    one, other = across.unbind(-1) if interleaved else across.chunk(2, -1)
    rotated = (
        torch.stack((-other, one), -1).flatten(-2) if interleaved else torch.cat((-other, one), -1)
    )
    return (wide * cos.to(dtype).unsqueeze(1) + rotated * sin.to(dtype).unsqueeze(1)).to(x.dtype)


def fake(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


OPERATOR = operator("rope", region="rope", launcher=launch, meaning=meaning, fake=fake)
