"""The shader of a few rows times a weight in eight bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowering.metal import int8_matmul
from tests.kernels.metal.checking import DTYPES, Tensor, check, drawn, nonfinite, same_nonfinite


def torchs_own(x: Tensor, weight: Tensor, scale: Tensor, bias: Any) -> Tensor:
    wide = (weight.to(scale.dtype) * scale[:, None]).to(x.dtype)
    return torch.nn.functional.linear(x, wide, bias)


def holds(x: Tensor, weight: Tensor, scale: Tensor, bias: Any = None) -> None:
    inputs = (x, weight, scale, bias)
    check("int8_matmul", int8_matmul.launch, torchs_own, inputs, kernel="int8_matmul")


def packed(columns: int, depth: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-128, 128, (columns, depth), dtype=torch.int8, generator=generator)
    return weight, drawn(columns).abs() / 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 16, 16), (1, 33, 256), (5, 7, 132), (8, 64, 64), (9, 6, 48), (19, 4, 4)],
)
def test_of_every_shape(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, bias = drawn(rows, depth, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    holds(x, *packed(columns, depth))
    holds(x, *packed(columns, depth), bias)


def test_of_every_layout() -> None:
    weight, scale = packed(12, 64)
    holds(drawn(6, 2, 64)[:, 1], weight, scale, drawn(24)[::2])
    holds(drawn(64, 3).t(), weight, scale)
    holds(drawn(2, 2, 65)[..., 1:], weight, scale)
    holds(drawn(1, 64).expand(3, 64), weight, scale)


def test_nan_and_infinity_stand_where_torch_has_them() -> None:
    weight, scale = packed(5, 16)
    weight[weight == 0] = 1
    inputs = (nonfinite(drawn(4, 16)), weight, scale, None)
    same_nonfinite(int8_matmul.launch(*inputs), torchs_own(*inputs), "int8_matmul")
