"""The shader of rotary embedding."""

from __future__ import annotations

import pytest
import torch

from lowering.metal import rope
from tests.kernels.metal.checking import (
    DTYPES,
    Tensor,
    check,
    drawn,
    far_apart,
    nonfinite,
    same_nonfinite,
)


def torchs_own(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """As models spell it, in the dtype of the tensors."""

    def rotated(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotated(query) * sin, key * cos + rotated(key) * sin


def holds(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    inputs = (query, key, cos, sin, interleaved)
    got = check("rope", rope.launch, torchs_own, inputs, kernel="rope")
    for ours, x in zip(got, (query, key), strict=True):
        assert ours.stride() == torch.empty_like(x).stride()


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Each number of a head has an angle of its own: halves may differ."""
    angles = drawn(*shape, seed=7) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 10, 64, 130])
def test_of_every_size(size: int, interleaved: bool, dtype: torch.dtype) -> None:
    query, key = drawn(2, 5, 3, size, dtype=dtype), drawn(2, 2, 3, size, dtype=dtype, seed=1)
    holds(query, key, *tables(2, 3, size, dtype=dtype), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_every_layout(interleaved: bool) -> None:
    both = drawn(2, 3, 6 + 2, 16)  # (batch, tokens, heads, size), as a projection leaves them
    query, key = both[:, :, :6].transpose(1, 2), both[:, :, 6:].transpose(1, 2)
    holds(query, key, *tables(2, 3, 16), interleaved)
    cos, sin = tables(1, 3, 16)  # the same for all sequences
    holds(query.contiguous(), key, cos.expand(2, 3, 16), sin.expand(2, 3, 16), interleaved)
    odd = drawn(2, 4, 3, 33)[..., 1:]
    holds(odd, odd[:, :1], *tables(2, 3, 32), interleaved)
    holds(drawn(2, 300, 1, 8), drawn(2, 1, 1, 8), *tables(2, 1, 8), interleaved)


def test_of_sequences_further_apart_than_32_bits_count() -> None:
    query, key = drawn(2, 2, 3, 8, dtype=torch.float16), drawn(2, 1, 3, 8, dtype=torch.float16)
    holds(far_apart(query), key, *tables(2, 3, 8, dtype=torch.float16))


def test_nan_and_infinity_stand_where_torch_has_them() -> None:
    query, key = nonfinite(drawn(1, 2, 4, 8)), drawn(1, 1, 4, 8)
    inputs = (query, key, *tables(1, 4, 8), False)
    same_nonfinite(rope.launch(*inputs), torchs_own(*inputs), "rope")
