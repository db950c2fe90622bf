"""The shader of RMS norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowering.metal import rms_norm
from tests.kernels.metal.checking import (
    DTYPES,
    Tensor,
    check,
    drawn,
    every_second,
    far_apart,
    nonfinite,
    same_nonfinite,
)

EPS = 1e-6


def torchs_own(x: Tensor, residual: Any, weight: Any, eps: float) -> tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    weight = None if weight is None else weight.to(summed.dtype)
    normed = torch.nn.functional.rms_norm(summed, x.shape[-1:], weight, eps)
    return normed, x.new_empty(0) if residual is None else summed


def holds(x: Tensor, residual: Any = None, weight: Any = None, eps: float = EPS) -> Any:
    inputs = (x, residual, weight, eps)
    return check("rms_norm", rms_norm.launch, torchs_own, inputs, kernel="rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 31, 64, 515, 1030])
def test_of_every_width(columns: int, dtype: torch.dtype) -> None:
    x, weight = drawn(3, columns, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    holds(x, None, weight)
    holds(x, drawn(3, columns, dtype=dtype, seed=2), weight)


def test_without_a_weight_and_with_a_wider_one() -> None:
    x = drawn(2, 3, 40, dtype=torch.float16)
    holds(x)
    holds(x, None, drawn(40, seed=1))


def test_of_rows_that_lie_apart() -> None:
    x = drawn(6, 48)[::2]
    holds(x, drawn(9, 48, seed=1)[1::3], every_second(drawn(48, seed=2)))
    holds(every_second(drawn(2, 3, 48)).transpose(0, 1), drawn(3, 2, 48, seed=1))
    holds(drawn(1, 48).expand(4, 48))


def test_of_rows_further_apart_than_32_bits_count() -> None:
    holds(far_apart(drawn(2, 40, dtype=torch.float16)), None, drawn(40, dtype=torch.float16))


def test_results_lie_as_torchs_would() -> None:
    x = drawn(3, 5, 16).transpose(0, 1)
    normed, summed = holds(x, x.contiguous())
    assert normed.stride() == (x * 2).stride()
    assert summed.stride() == (x * 2).stride()
    assert normed.shape == x.shape


def test_of_large_and_small_numbers() -> None:
    """Squares of half precision would overflow, and sums of them as well."""
    holds(drawn(2, 600, dtype=torch.float16) * 1000, None, drawn(600, dtype=torch.float16))
    holds(drawn(2, 64) * 1e-4, None, None, 1e-12)


def test_nan_and_infinity_stand_where_torch_has_them() -> None:
    x = nonfinite(drawn(4, 37))
    for residual in (None, drawn(4, 37, seed=1)):
        inputs = (x, residual, drawn(37, seed=2), EPS)
        same_nonfinite(rms_norm.launch(*inputs), torchs_own(*inputs), "rms_norm")
