"""Arguments for `lowering.ops`: small, odd in size, and at the edges that each operation has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_dispatch.numerics import distance
from lowering import ops, reference

INF = float("inf")


@dataclass(frozen=True)
class Case:
    """`make` gives the arguments in float64."""

    op: str
    name: str
    make: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def args(self, dtype: torch.dtype) -> tuple[Any, ...]:
        torch.manual_seed(0)
        return tuple(_as(value, dtype) for value in self.make())

    def run(self, args: tuple[Any, ...], call: Callable[..., Any] | None = None) -> list[Tensor]:
        found = (call or ops.BY_NAME[self.op])(*args, **self.kwargs)
        return list(found) if isinstance(found, tuple) else [found]

    def truth(self, args: tuple[Any, ...]) -> list[Tensor]:
        wide = tuple(_as(value, torch.float64) for value in args)
        return self.run(wide, reference.BY_NAME[self.op])

    def error(self, results: list[Tensor], args: tuple[Any, ...]) -> float:
        """The largest relative error over the results."""
        pairs = zip(results, self.truth(args), strict=True)
        return max(distance(got, truth).relative for got, truth in pairs)


def _as(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _r(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def _row_of_minus_infinity() -> Tensor:
    x = _r(3, 17)
    x[0] = -INF
    x[1, 4:] = -INF
    return x


def _angles(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    half = _r(tokens, size // 2)
    return torch.cat((half.cos(), half.cos()), -1), torch.cat((half.sin(), half.sin()), -1)


def _qkv(heads: int, shared: int, queries: int, keys: int, size: int) -> tuple[Tensor, ...]:
    return _r(2, heads, queries, size), _r(2, shared, keys, size), _r(2, shared, keys, size)


def _mask(queries: int, keys: int) -> Tensor:
    mask = torch.rand(queries, keys) > 0.4
    mask[1] = False  # a query that may look nowhere
    return mask


def _labels(rows: int, classes: int) -> Tensor:
    labels = torch.randint(0, classes, (rows,))
    labels[0] = -100
    return labels


CASES = [
    Case("matmul2d", "odd", lambda: (_r(7, 13), _r(13, 5))),
    Case("matmul2d", "long", lambda: (_r(3, 1000), _r(1000, 33))),
    Case("matmul2d", "one", lambda: (_r(1, 1), _r(1, 1))),
    Case("linear", "with bias", lambda: (_r(2, 3, 130), _r(65, 130), _r(65))),
    Case("linear", "no bias", lambda: (_r(9, 64), _r(31, 64))),
    Case("conv2d", "plain", lambda: (_r(2, 6, 9, 7), _r(4, 6, 3, 3), _r(4)), {"padding": 1}),
    Case("conv2d", "grouped", lambda: (_r(1, 6, 8, 8), _r(6, 2, 2, 3)),
         {"groups": 3, "stride": (2, 1), "dilation": (1, 2)}),
    Case("add", "broadcast", lambda: (_r(5, 1, 7), _r(3, 7))),
    Case("mul", "broadcast", lambda: (_r(5, 1, 7), _r(3, 7))),
    Case("gelu", "erf", lambda: (_r(5, 33) * 4,)),
    Case("gelu", "tanh", lambda: (_r(5, 33) * 4,), {"approximate": "tanh"}),
    Case("swiglu", "odd", lambda: (_r(5, 33) * 3, _r(5, 33))),
    Case("softmax_lastdim", "no power of two", lambda: (_r(3, 5, 1000) * 3,)),
    Case("softmax_lastdim", "rows of -inf", lambda: (_row_of_minus_infinity(),)),
    Case("softmax_lastdim", "large values", lambda: (_r(4, 17) * 100 + 1000,)),
    Case("layernorm", "hidden 1000", lambda: (_r(3, 1000) * 3 + 5, _r(1000), _r(1000))),
    Case("layernorm", "no bias", lambda: (_r(3, 33), _r(33))),
    Case("layernorm", "neither", lambda: (_r(2, 3, 31),), {"eps": 1e-3}),
    Case("rms_norm", "weighted", lambda: (_r(3, 1000), _r(1000))),
    Case("rms_norm", "plain", lambda: (_r(2, 3, 31),), {"eps": 1e-3}),
    Case("self_attention", "plain", lambda: _qkv(2, 2, 5, 7, 9)),
    Case("self_attention", "causal", lambda: _qkv(2, 2, 6, 6, 8), {"causal": True}),
    Case("self_attention", "grouped heads", lambda: _qkv(6, 2, 5, 5, 8), {"causal": True}),
    Case("self_attention", "scaled", lambda: _qkv(2, 2, 5, 5, 8), {"scale": 0.7}),
    Case("self_attention", "masked", lambda: (*_qkv(2, 2, 5, 7, 8), _mask(5, 7))),
    Case("self_attention", "masked and causal", lambda: (*_qkv(2, 2, 5, 5, 8), _mask(5, 5)),
         {"causal": True}),
    Case("self_attention", "added mask", lambda: (*_qkv(4, 2, 5, 7, 8), _r(2, 4, 5, 7)),
         {"causal": True}),
    Case("rope", "grouped heads", lambda: (_r(2, 4, 5, 6), _r(2, 2, 5, 6), *_angles(5, 6))),
    Case("embedding", "two dimensions", lambda: (torch.randint(0, 11, (3, 4)), _r(11, 7))),
    Case("cross_entropy", "one left out", lambda: (_r(6, 33) * 4, _labels(6, 33))),
]  # fmt: skip


def of(*wanted: str) -> list[Any]:
    """For parametrize: the cases of these operations."""
    return [pytest.param(one, id=f"{one.op}: {one.name}") for one in CASES if one.op in wanted]
