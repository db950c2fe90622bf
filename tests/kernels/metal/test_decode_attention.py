"""The shader of attention of one token to a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lowering.metal import decode_attention
from tests.kernels.metal.checking import (
    DTYPES,
    Tensor,
    check,
    drawn,
    every_second,
    far_apart,
    same_nonfinite,
)


def torchs_own(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=True
    )


def holds(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, scale: Any = None) -> Tensor:
    inputs = (query, key, value, mask, scale or 1 / math.sqrt(query.shape[-1]))
    launch = decode_attention.launch
    return check("decode", launch, torchs_own, inputs, kernel="decode_attention")


def problem(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    keys: int = 19,
    size: int = 40,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    query = drawn(batch, heads, 1, size, dtype=dtype)
    key = drawn(batch, key_heads, keys, size, dtype=dtype, seed=1)
    value = drawn(batch, key_heads, keys, value_size or size, dtype=dtype, seed=2)
    return query, key, value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "keys", "size"),
    [(4, 4, 1, 64), (4, 2, 19, 40), (6, 1, 33, 8), (2, 2, 70, 128), (2, 1, 9, 256), (1, 1, 7, 33)],
)
def test_of_every_shape(
    heads: int, key_heads: int, keys: int, size: int, dtype: torch.dtype
) -> None:
    holds(*problem(2, heads, key_heads, keys, size, dtype=dtype))


def test_values_of_another_size_and_a_scale() -> None:
    holds(*problem(size=64, value_size=24), scale=0.3)
    holds(*problem(size=24, value_size=200))


def test_of_every_layout() -> None:
    """A query as a projection leaves it, and a cache of which a part is used."""
    query = drawn(2, 1, 4, 40).transpose(1, 2)
    key, value = drawn(2, 50, 2, 40, seed=1), drawn(2, 2, 50, 40, seed=2)
    holds(query, key[:, 3:22].transpose(1, 2), value[:, :, 5:24])
    holds(query, drawn(2, 2, 40, 19, seed=3).transpose(2, 3), every_second(drawn(2, 2, 19, 40)))
    holds(query, key[:1, 3:22].transpose(1, 2).expand(2, 2, 19, 40), value[:, :, 5:24])


def test_of_caches_further_apart_than_32_bits_count() -> None:
    query, key, value = problem(dtype=torch.float16)
    holds(query, far_apart(key), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype: torch.dtype) -> None:
    query, key, value = problem(dtype=dtype)
    shown = drawn(2, 1, 1, 19, seed=5) > 0
    holds(query, key, value, shown)
    holds(query, key, value, (drawn(4, 1, 19, seed=6) > 0)[None].expand(2, -1, -1, -1))
    holds(query, key, value, drawn(2, 4, 1, 19, dtype=dtype, seed=7))
    hidden = torch.zeros(1, 1, 1, 19, dtype=dtype).masked_fill(~shown[:1], float("-inf"))
    holds(query, key, value, hidden)


def test_what_a_mask_hides_is_not_read() -> None:
    """A cache is larger than what is in it."""
    query, key, value = problem()
    shown = (torch.arange(19) < 11)[None, None, None]
    full = holds(query, key, value, shown)
    key[:, :, 11:], value[:, :, 11:] = float("nan"), float("inf")
    inputs = (query, key, value, shown, 1 / math.sqrt(40))
    assert torch.equal(decode_attention.launch(*inputs), full)
    assert torch.allclose(decode_attention.meaning(*inputs), full, atol=1e-5)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    query, key, value = problem()
    nothing = torch.zeros(1, 1, 1, 19, dtype=torch.bool)
    assert not holds(query, key, value, nothing).any()
    assert not holds(query, key, value, torch.full((1, 1, 1, 19), float("-inf"))).any()


def test_large_scores_do_not_overflow() -> None:
    query, key, value = problem()
    holds(query * 100, key * 100, value)


def test_nan_and_infinity_stand_where_torch_has_them() -> None:
    query, key, value = problem(batch=4)
    query[0, 0, 0, 3] = float("nan")
    query[1, 1, 0, 0] = float("inf")
    value[2, 0, 4, 7] = float("inf")
    key[3, 1, 8, 1] = float("-inf")
    inputs = (query, key, value, None, 0.2)
    same_nonfinite(decode_attention.launch(*inputs), torchs_own(*inputs), "decode")
