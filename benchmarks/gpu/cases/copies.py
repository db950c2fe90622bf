"""Copies that change the layout, and chains of elementwise operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import (
    FORWARD,
    Case,
    Inputs,
    Shape,
    Targets,
    Work,
    numel,
    ours,
    randn,
)
from benchmarks.gpu.cases.norms import moved, rows_and_weights
from benchmarks.gpu.rivals import MAX_AUTOTUNE

COPY = Targets(copy_share=0.75, backward_copy_share=0.75, rival=MAX_AUTOTUNE, times_rival=1.03)
SHAPES = ((8192, 8192), (4096, 14336))
ODD = ((333, 2047), (1000, 1001), (1, 1))


def one(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    return (randn(*shape, dtype=dtype, device=device),)


def twice(shape: Shape, size: int, direction: str) -> Work:
    return Work(2 * numel(shape) * size)


def own_chain(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x * y) + x


# silu(x * y) + x: an int is a value, x and y first, then what each step computes.
CHAIN: Any = [("mul", 0, 1), "silu", ("add", 3, 0)]


def chain(x: Tensor, y: Tensor) -> Any:
    return ours("elementwise")(CHAIN, x, y)


CASES = (
    Case(
        "transpose_copy",
        "transpose_copy",
        one,
        lambda x: ours("transpose_copy")(x, 0, 1),
        lambda x: x.transpose(0, 1).contiguous(),
        twice,
        SHAPES,
        ODD,
        tiny=(5, 40),
        targets=COPY,
    ),
    Case(
        "concat",
        "concat",
        rows_and_weights(2, 0),
        lambda x, y: ours("concat")([x, y], 1),
        lambda x, y: torch.cat([x, y], 1),
        moved(4, 4),
        SHAPES,
        ODD,
        tiny=(5, 40),
        directions=(FORWARD,),  # backward it is two views
        targets=COPY,
    ),
    Case(
        "slice_copy",
        "slice_copy",
        one,
        lambda x: ours("slice_copy")(x, 1, 1, x.shape[1] // 2 + 1, 1),
        lambda x: x[:, 1 : x.shape[1] // 2 + 1].contiguous(),
        moved(1, 1.5),
        SHAPES[:1],
        ODD[:2],
        tiny=(5, 40),
        targets=COPY,
    ),
    Case(
        "pad_copy",
        "pad_copy",
        one,
        lambda x: ours("pad_copy")(x, (3, 5, 1, 2), 0.0),
        lambda x: functional.pad(x, (3, 5, 1, 2)),
        twice,
        SHAPES[:1],
        ODD[:2],
        tiny=(5, 40),
        targets=COPY,
    ),
    Case(
        "elementwise",
        "elementwise",
        rows_and_weights(2, 0),
        chain,
        own_chain,
        moved(3, 5),
        SHAPES,
        ODD,
        tiny=(5, 40),
        huge=(600_000, 4096),
        rows_of=(0, 1),
        targets=Targets(
            copy_share=0.9, backward_copy_share=0.9, rival=MAX_AUTOTUNE, times_rival=1.03
        ),
    ),
)
