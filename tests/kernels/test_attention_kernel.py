"""mha_attention, called directly: softmax(q k^T * scale + mask) v."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from lowering import machine
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import kernels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Tensor = torch.Tensor
Sizes = tuple[int, int, int, int, int, int]  # batch, heads, key heads, queries, keys, head size

SIZES: list[Sizes] = [
    (1, 1, 1, 1, 1, 1), (2, 3, 3, 5, 7, 16), (1, 4, 4, 64, 64, 64), (1, 2, 2, 33, 65, 80),
    (2, 2, 2, 17, 100, 128), (1, 3, 1, 31, 31, 24), (1, 8, 2, 20, 45, 40), (1, 2, 2, 130, 130, 33),
    (3, 1, 1, 2, 300, 7), (1, 2, 1, 48, 257, 96), (1, 1, 1, 65, 3, 256),
]  # fmt: skip
KEYS_OF_A_STEP = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 255, 257, 300]
MASKS = ["none", "causal", "bool", "float", "bool, per head", "float, of minus infinity"]


def operands(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, key_heads, queries, keys, size = sizes
    return (
        torch.randn(batch, heads, queries, size),
        torch.randn(batch, key_heads, keys, size),
        torch.randn(batch, key_heads, keys, size),
    )


def mask_of(kind: str, sizes: Sizes) -> Tensor | None:
    """Every row sees at least the first key."""
    batch, heads, _, queries, keys, _ = sizes
    if kind == "bool":
        mask = torch.rand(queries, keys) > 0.4
    elif kind == "bool, per head":
        mask = torch.rand(batch, heads, 1, keys) > 0.5
    elif kind == "float":
        return torch.randn(batch, 1, queries, keys) * 3
    elif kind == "float, of minus infinity":
        hidden = torch.rand(1, 1, queries, keys) > 0.6
        hidden[..., 0] = False
        return torch.zeros(1, 1, queries, keys).masked_fill_(hidden, -torch.inf)
    else:
        return None
    mask[..., 0] = True
    return mask


def compute(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return kernels().mha_attention(q, k, v, mask, causal, scale)


def expected(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def check(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    got = compute(q, k, v, mask, causal, scale)
    own = expected(q, k, v, mask, causal, scale)
    wide = expected(q.double(), k.double(), v.double(), wide_mask, causal, scale)
    assert_contract(got, own, wide, where)
    assert got.transpose(1, 2).is_contiguous(), "heads do not lie side by side"
    return got


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: Sizes, kind: str) -> None:
    q, k, v = operands(sizes)
    check(kind, q, k, v, mask_of(kind, sizes), kind == "causal")
    check(kind, q, k, v, mask_of(kind, sizes), kind == "causal", scale=0.3)


@pytest.mark.parametrize("size", [1, 5, 16, 64, 80, 128, 129])
def test_steps_of_one_token(size: int) -> None:
    """Decoding: the keys of a cache that grows, split over threads or not."""
    for keys in KEYS_OF_A_STEP:
        for heads, key_heads in [(2, 2), (6, 2)]:
            sizes = (5, heads, key_heads, 1, keys, size)
            q, k, v = operands(sizes)
            for kind in ("none", "bool", "float"):
                check(f"{keys} keys, {kind}", q, k, v, mask_of(kind, sizes))


@pytest.mark.parametrize("queries", [1, 40])
def test_values_of_another_size(queries: int) -> None:
    q, k, v = operands((1, 2, 2, queries, 50, 32))
    for size in (1, 17, 64):
        got = kernels().mha_attention(q, k, torch.randn(1, 2, 50, size), None, False, 0.2)
        assert got.shape == (1, 2, queries, size)
    weights = torch.softmax(q.double() @ k.double().mT * 0.2, -1)
    got = kernels().mha_attention(q, k, v[..., :17], None, False, 0.2)
    torch.testing.assert_close(got, (weights @ v[..., :17].double()).float())


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_rows_that_see_nothing(queries: int) -> None:
    """Whatever eager makes of them, and nothing of it in other rows."""
    sizes = (2, 2, 1, queries, 70, 16)
    q, k, v = operands(sizes)
    for kind in ("bool", "float, of minus infinity"):
        mask = mask_of(kind, sizes)
        assert mask is not None
        mask = mask.expand(2, 2, queries, 70).clone()
        mask[1, :, queries // 2] = False if kind == "bool" else -torch.inf
        check(kind, q, k, v, mask)


@pytest.mark.parametrize("queries", [1, 2, 40])
def test_scores_far_out(queries: int) -> None:
    """Softmax of large scores, and of a mask that hides by the lowest number, as models do."""
    sizes = (1, 2, 2, queries, 90, 32)
    q, k, v = operands(sizes)
    check("large scores", q * 30, k * 30, v)
    check("large and equal", torch.full_like(q, 30), torch.full_like(k, 30), v)
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(1, 1, queries, 90).masked_fill_(torch.rand(1, 1, queries, 90) > 0.5, lowest)
    check("the lowest number", q, k, v, mask)
    check("nothing but the lowest number", q, k, v, torch.full_like(mask, lowest))


@pytest.mark.parametrize("masked", [-88.0, -100.0, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("queries", [1, 40])
def test_what_a_mask_hides_has_no_weight(queries: int, masked: float) -> None:
    """Denormal weights take Intel's CPUs a hundred times as long: Swin masks by -100."""
    q, k, v = operands((2, 2, 2, queries, 49, 32))
    mask = torch.zeros(2, 1, queries, 49)
    mask[..., 20:] = masked
    check(f"masked by {masked}", q, k, v, mask)
    v[:, :, 20:] = torch.finfo(torch.float32).max  # what is lost of it is below 1e-38 of this
    hidden = compute(q * 0, k, v, mask, False, None)
    seen = compute(q * 0, k[:, :, :20], v[:, :, :20], None, False, None)
    torch.testing.assert_close(hidden, seen)


@pytest.mark.parametrize("queries", [1, 20])
def test_special_values(queries: int) -> None:
    q, k, v = operands((1, 2, 2, queries, 40, 16))
    q[0, 0, 0, 3] = float("nan")
    check("NaN in a query", q, k, v)
    q, k, v = operands((1, 2, 2, queries, 40, 16))
    v[0, 1, 7, 3] = float("nan")
    check("NaN in a value", q, k, v)
    k[0, 0, 5, 2] = float("nan")
    check("NaN in a key", q, k, v)


@pytest.mark.parametrize("queries", [1, 45])
def test_strides(queries: int) -> None:
    """Heads side by side, as projections leave them; a cache longer than what is used of it."""
    batch, heads, keys, size = 2, 4, 77, 24
    fused = torch.randn(batch, max(queries, keys), 3, heads, size)
    q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))
    check("out of one projection", q[:, :, :queries], k[:, :, :keys], v[:, :, :keys])
    cache = torch.full((batch, heads, 128, size), float("nan"))
    cache[:, :, :keys] = torch.randn(batch, heads, keys, size)
    check("a part of a cache", q[:, :, :queries], cache[:, :, :keys], cache[:, :, :keys])
    shared = torch.randn(1, 1, keys, size).expand(batch, heads, keys, size)
    check("one head for all", q[:, :, :queries], shared, shared)
    across = torch.randn(batch, heads, size, keys).mT
    check("keys in columns", q[:, :, :queries], across, across)
    mask = (torch.rand(keys, queries) > 0.3).t()
    mask[:, 0] = True
    check("a transposed mask", q[:, :, :queries], across, across, mask)
    check("every other row of a mask", q[:, :, :queries], across, across,
          torch.randn(queries, 2 * keys)[:, ::2])  # fmt: skip


def test_empty() -> None:
    for sizes in [(0, 2, 2, 3, 4, 8), (1, 2, 2, 0, 4, 8), (1, 0, 0, 3, 4, 8)]:
        q, k, v = operands(sizes)
        assert compute(q, k, v, None, False, None).shape == q.shape


@pytest.mark.parametrize("sizes", [*SIZES, (1, 2, 2, 1, 5000, 64), (2, 8, 2, 1, 333, 128)], ids=str)
def test_the_thread_count_changes_no_bit(sizes: Sizes) -> None:
    found: list[Any] = []
    q, k, v = operands(sizes)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(compute(q, k, v, None, True, None))
    for other in found[1:]:
        assert_bit_identical(other, found[0], "another number of threads")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_half_precision(sizes: Sizes, kind: str, dtype: torch.dtype) -> None:
    """Widened as it is read: every bit is that of float32 operands, rounded once at the end.

    In tiles weights are rounded as well, as they are in torch's own operator.
    """
    mask, causal = mask_of(kind, sizes), kind == "causal"
    halves = [tensor.to(dtype) for tensor in operands(sizes)]
    got = compute(*halves, mask, causal, None)
    wide = compute(*(tensor.float() for tensor in halves), mask, causal, None)
    if in_tiles(sizes, dtype):
        own = expected(*halves, in_halves(mask, dtype), causal, None)
        assert_contract(got, own, wide.double(), f"in tiles, {kind}")
    else:
        assert_bit_identical(got, wide.to(dtype), f"{dtype}, {kind}")


def in_tiles(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Few rows are not worth laying out keys and values."""
    _, heads, key_heads, queries, _, _ = sizes
    feature = "amx_bf16" if dtype is torch.bfloat16 else "amx_fp16"
    return feature in machine.cpu().isa and queries * heads // key_heads > 8


def in_halves(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return mask.to(dtype) if mask is not None and mask.is_floating_point() else mask


def as_floats(mask: Tensor | None) -> Tensor | None:
    return mask.float() if mask is not None and mask.is_floating_point() else mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_tiles_over_several_blocks(kind: str, dtype: torch.dtype) -> None:
    """Keys in three blocks, the last of one key; rows of several heads in one tile."""
    if not in_tiles(sizes := (1, 4, 2, 37, 257, 48), dtype):
        pytest.skip(f"the CPU has no tiles of {dtype}")
    mask, causal = in_halves(mask_of(kind, sizes), dtype), kind == "causal"
    q, k, v = (tensor.to(dtype) for tensor in operands(sizes))
    v = torch.cat([v, v[..., :20]], 3)  # values of another size
    wide = [q.float(), k.float(), v.float(), as_floats(mask)]
    reference = expected(*wide, causal, -0.2).double()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(compute(q, k, v, as_floats(mask), causal, -0.2))
    assert_contract(found[0], expected(q, k, v, mask, causal, -0.2), reference, kind)
    for other in found[1:]:
        assert_bit_identical(other, found[0], "another number of threads")


def test_half_precision_between_other_numbers() -> None:
    """Each operand stands between NaNs."""
    for size in (5, 16, 33):
        made = []
        for shape in [(1, 2, 19, size), (1, 2, 40, size), (1, 2, 40, size)]:
            memory = torch.full((torch.Size(shape).numel() + 256,), float("nan")).bfloat16()
            made.append(memory[128:-128].view(shape).copy_(torch.randn(shape)))
        for rows in (1, 19):
            got = kernels().mha_attention(made[0][:, :, :rows], *made[1:], None, False, 0.3)
            assert not got.isnan().any(), f"{rows} rows of {size}"
