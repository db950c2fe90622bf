"""Gated activations, rotary embedding, and embedding tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import FORWARD, Case, Inputs, Shape, Targets, Work, ours, randn
from benchmarks.gpu.cases.norms import EPS, HUGE, moved, rows_and_weights
from benchmarks.gpu.rivals import MAX_AUTOTUNE, liger

STREAMED = Targets(copy_share=0.9, backward_copy_share=0.9, rival=MAX_AUTOTUNE, times_rival=1.03)
GATED = ((8192, 14336), (8192, 3072), (1, 14336))
GATED_ODD = ((333, 2047), (1000, 11008), (1, 1))


def packed(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, columns = shape
    return (randn(rows, 2 * columns, dtype=dtype, device=device),)


def own_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def own_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


# --- rotary embedding: (batch, heads, key heads, tokens, size of a head) --------------------------


def heads_and_tables(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    batch, heads, key_heads, tokens, size = shape
    # As projections leave them: tokens first, heads beside each other.
    query, key = (
        randn(batch, tokens, n, size, dtype=dtype, device=device, grad=False)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, key_heads)
    )
    angle = torch.arange(tokens, device=device)[:, None] / 10000.0 ** (
        torch.arange(size // 2, device=device) / (size // 2)
    )
    angle = torch.cat((angle, angle), -1)
    return query, key, angle.cos().to(dtype), angle.sin().to(dtype)


def heads_tables_and_norms(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    weights = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    return (*heads_and_tables(shape, dtype, device), *weights)


def own_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(x * cos + _turned(x) * sin for x in (query, key))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def own_rope_with_norms(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor
) -> tuple[Tensor, ...]:
    pairs = zip((query, key), norms, strict=True)
    normed = [functional.rms_norm(x, x.shape[-1:], norm, EPS) for x, norm in pairs]
    return own_rope(*normed, cos, sin)


def rope_with_norms(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor
) -> tuple[Tensor, ...]:
    named = dict(zip(("query_norm", "key_norm"), norms, strict=True))
    return ours("rope")(query, key, cos, sin, eps=EPS, **named)


def rope_work(has_norms: bool) -> Any:
    def work(shape: Shape, size: int, direction: str) -> Work:
        batch, heads, key_heads, tokens, width = shape
        times = 3 if has_norms and direction != FORWARD else 2  # a norm's backward reads its input
        return Work(times * batch * (heads + key_heads) * tokens * width * size)

    return work


ROPE = ((4, 32, 8, 4096, 128), (1, 32, 32, 2048, 128), (64, 32, 8, 1, 128))
ROPE_ODD = ((2, 5, 3, 333, 80), (1, 1, 1, 1, 2))

# --- embedding: (rows of the table, columns, ids) -------------------------------------------------


def ids_and_table(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, columns, count = shape
    return torch.randint(rows, (count,), device=device), randn(
        rows, columns, dtype=dtype, device=device
    )


def embedding_work(shape: Shape, size: int, direction: str) -> Work:
    """The backward writes the whole table."""
    rows, columns, count = shape
    return Work(columns * size * (2 * count if direction == FORWARD else count + rows))


CASES = (
    Case(
        "swiglu",
        "swiglu",
        rows_and_weights(2, 0),
        ours("swiglu"),
        own_swiglu,
        moved(3, 5),
        GATED,
        GATED_ODD,
        tiny=(5, 40),
        huge=HUGE,
        rows_of=(0, 1),
        rivals=(liger("swiglu", lambda f: f.liger_swiglu),),
        targets=STREAMED,
    ),
    Case(
        "geglu",
        "geglu",
        rows_and_weights(2, 0),
        lambda gate, up: ours("geglu")(gate, up, "tanh"),
        own_geglu,
        moved(3, 5),
        GATED[:1],
        GATED_ODD,
        tiny=(5, 40),
        rivals=(liger("geglu", lambda f: f.liger_geglu),),
        targets=STREAMED,
    ),
    Case(
        "swiglu_packed",
        "swiglu_packed",
        packed,
        ours("swiglu_packed"),
        lambda x: own_swiglu(*x.chunk(2, -1)),
        moved(3, 5),
        GATED[:1],
        GATED_ODD,
        tiny=(5, 40),
        targets=STREAMED,
    ),
    Case(
        "geglu_packed",
        "geglu_packed",
        packed,
        lambda x: ours("geglu_packed")(x, "tanh"),
        lambda x: own_geglu(*x.chunk(2, -1)),
        moved(3, 5),
        GATED[:1],
        GATED_ODD,
        tiny=(5, 40),
        targets=STREAMED,
    ),
    Case(
        "rope",
        "rope",
        heads_and_tables,
        ours("rope"),
        own_rope,
        rope_work(False),
        ROPE,
        ROPE_ODD,
        tiny=(1, 4, 2, 5, 16),
        rivals=(
            liger(
                "rope",
                lambda f: lambda q, k, c, s: f.liger_rope(q, k, c[None], s[None]),
                clones=True,
            ),
        ),
        targets=STREAMED,
    ),
    Case(
        "rope_with_norms",
        "rope",
        heads_tables_and_norms,
        rope_with_norms,
        own_rope_with_norms,
        rope_work(True),
        ROPE,
        ROPE_ODD[:1],
        tiny=(1, 4, 2, 5, 16),
        targets=STREAMED,
    ),
    Case(
        "embedding",
        "embedding",
        ids_and_table,
        ours("embedding"),
        functional.embedding,
        embedding_work,
        ((128256, 4096, 8192), (30522, 768, 16384)),
        ((3, 1000, 5000), (1000, 333, 777)),
        tiny=(11, 40, 30),
        huge=(600_000, 4096, 8192),
        targets=Targets(
            copy_share=0.9, backward_copy_share=0.75, rival=MAX_AUTOTUNE, times_rival=1.03
        ),
        layouts=("plain", "sliced"),
    ),
)
