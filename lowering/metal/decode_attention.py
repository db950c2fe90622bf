"""Attention of one new token of each sequence to a cache of keys and values, grouped heads or not.

Any strides will do, as long as they fit the shapes: caches are views of larger tensors, and queries
come transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.metal import shaders
from lowering.metal.registration import operator

LARGEST_SIZE = 256  # of a head; the shader holds so many numbers
_THREADS = 256  # the shader counts on eight simdgroups


def launch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, _, size = query.shape
    out = torch.empty((batch, heads, 1, value.shape[3]), dtype=query.dtype, device=query.device)
    masked = 0 if mask is None else 1 if mask.dtype is torch.bool else 2
    seen = query if mask is None else mask.expand(batch, heads, 1, key.shape[2])
    library = shaders.library(
        "decode_attention", NUMBER=query.dtype, MASK=seen.dtype, MASKED=str(masked)
    )
    # A mask is read along the keys, where the other tensors have rows.
    of_mask = (*seen.stride()[:2], 0, seen.stride(3))
    library.decode_attention(
        query,
        key,
        value,
        seen,
        out,
        query.stride(),
        key.stride(),
        value.stride(),
        of_mask,
        key.shape[2],
        heads,
        heads // key.shape[1],
        size,
        value.shape[3],
        scale,
        threads=[heads * _THREADS, batch],
        group_size=[_THREADS, 1],
    )
    return out


def meaning(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """In plain torch. What a mask of bool hides is not looked at, whatever lies there."""
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    wide, keys, values = (one.to(dtype) for one in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(groups, 1) for one in (keys, values))
    scores = (wide * scale) @ keys.transpose(-1, -2)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        hidden = ~mask.expand(*scores.shape[:-1], scores.shape[-1])
        values = values.masked_fill(hidden.transpose(-1, -2) & ~values.isfinite(), 0.0)
    elif mask is not None:
        scores = scores + mask.to(dtype)
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return (weights @ values).to(query.dtype)


def fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


OPERATOR = operator(
    "decode_attention", region="attention", launcher=launch, meaning=meaning, fake=fake
)
