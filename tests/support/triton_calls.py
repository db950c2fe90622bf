"""One call of every public function of `triton_kernels`, with so many rows or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def matrix(rows: int, columns: int = 32) -> Tensor:
    return torch.randn(rows, columns)


def heads(rows: int, count: int = 4) -> Tensor:
    return torch.randn(2, count, rows, 16)


def ids(rows: int) -> Tensor:
    return torch.randint(32, (rows,))


def pages(rows: int) -> tuple[Tensor, ...]:
    table = torch.arange(2).view(1, 2)
    return (torch.randn(1, 4, 1, 16), *(torch.randn(2, 2, 8, 16) for _ in "kv"), table)


def in_bytes(rows: int, columns: int) -> Tensor:
    return torch.randint(-9, 9, (rows, columns), dtype=torch.int8)


CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "add_layer_norm": lambda n: (matrix(n), matrix(n), torch.ones(32)),
    "add_rms_norm": lambda n: (matrix(n), matrix(n), torch.ones(32)),
    "attention": lambda n: (heads(n), heads(n, 2), heads(n, 2)),
    "concat": lambda n: ([matrix(n), matrix(n)], 0),
    "cross_entropy": lambda n: (matrix(n), ids(n)),
    "decode_attention": lambda n: (heads(1), heads(n, 2), heads(n, 2)),
    "elementwise": lambda n: ((("relu", 0),), matrix(n)),
    "embedding": lambda n: (ids(n), matrix(32)),
    "geglu": lambda n: (matrix(n), matrix(n)),
    "geglu_packed": lambda n: (matrix(n),),
    "int8_weight_matmul": lambda n: (matrix(n), in_bytes(16, 32), torch.ones(16)),
    "layer_norm": lambda n: (matrix(n), torch.ones(32)),
    "linear_cross_entropy": lambda n: (matrix(n), matrix(40), ids(n)),
    "log_softmax": lambda n: (matrix(n),),
    "matmul": lambda n: (matrix(n), matrix(32, 16)),
    "pad_copy": lambda n: (matrix(n), (1, 2)),
    "paged_decode_attention": lambda n: (*pages(n), torch.tensor([min(n, 16)])),
    "quantise_rows": lambda n: (matrix(n), torch.int8),
    "quantise_weight": lambda n: (matrix(n),),
    "rms_norm": lambda n: (matrix(n), torch.ones(32)),
    "rms_norm_quantised": lambda n: (matrix(n),),
    "rope": lambda n: (heads(n), heads(n, 2), torch.randn(n, 16), torch.randn(n, 16)),
    "scaled_matmul": lambda n: (
        in_bytes(n, 32),
        in_bytes(16, 32).t(),
        torch.ones(n),
        torch.ones(16),
    ),
    "slice_copy": lambda n: (matrix(n), 1, 2, 9),
    "softmax": lambda n: (matrix(n),),
    "swiglu": lambda n: (matrix(n), matrix(n)),
    "swiglu_packed": lambda n: (matrix(n),),
    "transpose_copy": lambda n: (matrix(n), 0, 1),
}
