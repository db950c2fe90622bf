"""Attention: (batch, heads, key heads, queries, keys, size of a head)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import FORWARD, Case, Inputs, Shape, Targets, Work, ours, randn
from benchmarks.gpu.rivals import CUDNN, FLASH, flex_decoding, sdpa

PREFILL = (
    (4, 48, 48, 8192, 8192, 128),
    (1, 32, 8, 16384, 16384, 128),
    (16, 32, 8, 2048, 2048, 128),
    (16, 16, 16, 4096, 4096, 64),
)
BOTH_WAYS = ((32, 12, 12, 512, 512, 64), (64, 12, 12, 197, 197, 64), (1, 24, 24, 4608, 4608, 128))
ODD = ((1, 4, 2, 333, 777, 80), (2, 3, 3, 1, 1025, 96), (1, 8, 1, 1999, 1999, 256))
DECODE = (
    (32, 32, 8, 1, 8192, 128),
    (1, 32, 8, 1, 131072, 128),
    (64, 32, 8, 1, 4096, 128),
    (8, 32, 32, 1, 8192, 128),
    (1, 32, 4, 1, 4096, 128),
)
DECODE_ODD = ((3, 6, 2, 1, 333, 80), (1, 8, 1, 5, 1025, 96), (2, 4, 4, 1, 1, 64))
PAGE = 16  # keys


def heads(gradients: bool = True) -> Any:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
        batch, n, key_heads, queries, keys, size = shape
        sizes = ((n, queries), (key_heads, keys), (key_heads, keys))
        return tuple(
            randn(batch, count, rows, size, dtype=dtype, device=device, grad=gradients)
            for count, rows in sizes
        )

    return make


def is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def causal(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {"is_causal": True, "enable_gqa": is_grouped(query, key)}


def whole(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {"enable_gqa": is_grouped(query, key)}


def own(settings: Any) -> Any:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        more = settings(query, key)
        return functional.scaled_dot_product_attention(query, key, value, **more)

    return call


def attention_work(is_causal: bool) -> Any:
    def work(shape: Shape, size: int, direction: str) -> Work:
        batch, n, key_heads, queries, keys, width = shape
        seen = queries * keys * (0.5 if is_causal else 1.0)
        flops = 4.0 * batch * n * seen * width * (1 if direction == FORWARD else 2.5)
        moved = 2 * batch * (n * queries + key_heads * keys) * width * size
        return Work(moved * (1 if direction == FORWARD else 2), flops)

    return work


# --- one new token against a cache ----------------------------------------------------------------


def with_lengths(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    batch, _, _, queries, keys, _ = shape
    least = max(queries, keys // 2)
    lengths = torch.randint(least, keys + 1, (batch,), device=device, dtype=torch.int32)
    return (*heads(False)(shape, dtype, device), lengths)


def paged(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """The cache in pages that lie anywhere."""
    batch, n, key_heads, queries, keys, size = shape
    pages = -(-keys // PAGE)
    query = randn(batch, n, queries, size, dtype=dtype, device=device, grad=False)
    stores = (
        randn(batch * pages, key_heads, PAGE, size, dtype=dtype, device=device, grad=False)
        for _ in range(2)
    )
    table = torch.randperm(batch * pages, device=device).view(batch, pages).to(torch.int32)
    lengths = torch.randint(max(queries, keys // 2), keys + 1, (batch,), device=device)
    return query, *stores, table, lengths.to(torch.int32)


def own_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """The queries are the newest of the `lengths` tokens: the last one sees all of them."""
    place = torch.arange(key.shape[2], device=key.device)
    newest = lengths[:, None] - query.shape[2] + torch.arange(query.shape[2], device=key.device)
    seen = place <= newest[..., None]
    return functional.scaled_dot_product_attention(
        query, key, value, seen[:, None], enable_gqa=is_grouped(query, key)
    )


def own_paged(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, n: Tensor) -> Tensor:
    key, value = (store[table.long()].transpose(1, 2).flatten(2, 3) for store in (keys, values))
    return own_decode(query, key, value, n)


def own_whole_cache(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    lengths = torch.full((len(key),), key.shape[2], device=key.device)
    return own_decode(query, key, value, lengths)


def decode_work(share: float) -> Any:
    """`share` of the cache is filled."""

    def work(shape: Shape, size: int, direction: str) -> Work:
        batch, n, key_heads, queries, keys, width = shape
        moved = 2.0 * batch * (key_heads * keys * share + n * queries) * width * size
        return Work(moved, 4.0 * batch * n * queries * keys * share * width)

    return work


# For one query per sequence, where nothing is masked.
DECODE_TARGETS = Targets(copy_share=0.8, least_bytes=256 << 20)
PREFILL_TARGETS = Targets(rival=FLASH)

CASES = (
    Case(
        "attention_causal",
        "attention",
        heads(),
        lambda q, k, v: ours("attention")(q, k, v, causal=True),
        own(causal),
        attention_work(True),
        PREFILL,
        ODD,
        tiny=(1, 4, 2, 20, 20, 16),
        rivals=sdpa(causal),
        compiles=False,
        targets=PREFILL_TARGETS,
        checks_usual=False,
    ),
    Case(
        "attention",
        "attention",
        heads(),
        ours("attention"),
        own(whole),
        attention_work(False),
        BOTH_WAYS,
        ODD,
        tiny=(1, 4, 2, 20, 24, 16),
        rivals=sdpa(whole),
        compiles=False,
        targets=PREFILL_TARGETS,
        checks_usual=False,
    ),
    Case(
        "decode_attention",
        "decode_attention",
        heads(False),
        ours("decode_attention"),
        own_whole_cache,
        decode_work(1.0),
        DECODE,
        DECODE_ODD,
        tiny=(2, 4, 2, 1, 40, 16),
        directions=(FORWARD,),
        rivals=(*sdpa(whole, FLASH, CUDNN), flex_decoding()),
        compiles=False,
        targets=DECODE_TARGETS,
        checks_usual=False,
    ),
    Case(
        "decode_attention_lengths",
        "decode_attention",
        with_lengths,
        lambda q, k, v, lengths: ours("decode_attention")(q, k, v, lengths=lengths),
        own_decode,
        decode_work(0.75),
        DECODE[:1],
        DECODE_ODD,
        tiny=(2, 4, 2, 1, 40, 16),
        directions=(FORWARD,),
        compiles=False,
        targets=DECODE_TARGETS,
        checks_usual=False,
    ),
    Case(
        "paged_decode_attention",
        "paged_decode_attention",
        paged,
        ours("paged_decode_attention"),
        own_paged,
        decode_work(0.75),
        DECODE[:1],
        DECODE_ODD[:2],
        tiny=(2, 4, 2, 1, 40, 16),
        directions=(FORWARD,),
        compiles=False,
        targets=DECODE_TARGETS,
        layouts=("plain",),
        checks_usual=False,
    ),
)
