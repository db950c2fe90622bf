"""decode_attention and its paged kin, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import architectures, decode_attention, launching, paged_decode_attention
from triton_kernels.configurations import decode_attention as configurations
from triton_kernels.errors import KernelArgumentError

Tensor = torch.Tensor
ONE = ["decode_attention_kernel"]
SEVERAL = ["decode_attention_kernel", "decode_attention_combine_kernel"]


def operands(
    batch: int = 2,
    heads: int = 4,
    keys: int = 70,
    size: int = 16,
    *,
    queries: int = 1,
    key_heads: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    of_keys = (batch, key_heads or heads, keys)
    return (
        torch.randn(batch, heads, queries, size, dtype=dtype),
        torch.randn(*of_keys, size, dtype=dtype),
        torch.randn(*of_keys, value_size or size, dtype=dtype),
    )


def ours(**settings: Any) -> Callable[..., Tensor]:
    def compute(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> Tensor:
        return decode_attention(query, key, value, lengths=lengths, **settings)

    return compute


def one_by_one(
    softcap: float | None = None, window: int | None = None, scale: float | None = None
) -> Callable[..., Tensor]:
    """Every token of every sequence on its own, with the keys that it sees cut out."""

    def compute(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> Tensor:
        batch, heads, queries, size = query.shape
        group = heads // key.shape[1]
        out = query.new_zeros(batch, heads, queries, value.shape[3])
        for b in range(batch):
            length = key.shape[2] if lengths is None else int(lengths[b])
            for token in range(queries):
                end = length - queries + token + 1
                begin = 0 if window is None else max(0, end - 1 - window)
                if end <= begin:
                    continue
                for head in range(heads):
                    seen = key[b, head // group, begin:end]
                    factor = 1 / math.sqrt(size) if scale is None else scale
                    scores = seen @ query[b, head, token] * factor
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    weights = scores.softmax(-1)
                    out[b, head, token] = weights @ value[b, head // group, begin:end]
        return out

    return compute


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("keys", "size"), [(1, 8), (40, 16), (300, 24), (130, 80)])
def test_one_query(keys: int, size: int, dtype: torch.dtype) -> None:
    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)

    inputs = operands(2, 3, keys, size, dtype=dtype)
    check(f"{keys} {size}", ours(), own, inputs, launches=ONE if keys <= 128 else SEVERAL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "queries"), [(6, 2, 1), (4, 2, 3), (20, 1, 4)])
def test_heads_and_queries_that_share_keys(
    heads: int, key_heads: int, queries: int, dtype: torch.dtype
) -> None:
    inputs = operands(2, heads, 150, key_heads=key_heads, queries=queries, dtype=dtype)
    lengths = torch.tensor([97, 150])
    check("group", ours(), one_by_one(), (*inputs, lengths), launches=SEVERAL)


@pytest.mark.parametrize("keys", [50, 300])
def test_lengths(keys: int) -> None:
    lengths = torch.tensor([0, 1, 2, keys // 2, keys - 1, keys], dtype=torch.int32)
    query, key, value = operands(6, 1, keys, queries=2)
    own = one_by_one()(query, key, value, lengths)
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length:], value[b, :, length:] = torch.nan, torch.nan
    check("lengths", ours(), lambda *of: own.to(of[0].dtype), (query, key, value, lengths))
    assert not decode_attention(query, key, value, lengths=lengths)[0].any()


@pytest.mark.parametrize("window", [0, 1, 30, 1000])
def test_window(window: int) -> None:
    inputs = (*operands(2, 2, 400, queries=3), torch.tensor([333, 7]))
    check(f"{window}", ours(window=window), one_by_one(window=window), inputs)


def test_softcap_and_scale_and_values_of_another_size() -> None:
    inputs = operands(2, 2, 150, 16, value_size=20, queries=2)
    settings: dict[str, Any] = {"softcap": 2.0, "scale": 0.7}
    check("softcap", ours(**settings), one_by_one(**settings), inputs, launches=SEVERAL)


@pytest.mark.parametrize("layout", ["rows before heads", "transposed", "expanded", "strided"])
def test_layouts(layout: str) -> None:
    def laid(rows: int) -> Tensor:  # to (2, 4, rows, 16)
        base = torch.randn(2 * 4 * rows * 16)
        return {
            "rows before heads": lambda: base.reshape(2, rows, 4, 16).transpose(1, 2),
            "transposed": lambda: base.reshape(2, 4, 16, rows).mT,
            "expanded": lambda: base.reshape(2, 4, rows, 16)[:, :1].expand(2, 4, rows, 16),
            "strided": lambda: base.repeat_interleave(2).reshape(2, 4, rows, 32)[..., ::2],
        }[layout]()

    inputs = (laid(2), laid(150), laid(150), torch.tensor([[150, 5], [90, 5]])[:, 0])
    check(layout, ours(), one_by_one(), inputs, launches=SEVERAL)


def paged(key: Tensor, value: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same cache in pages, shuffled, with NaN where nothing lies."""
    batch, heads, keys, _ = key.shape
    of_one = -(-keys // page_size)
    order = torch.randperm(batch * of_one + 3)[: batch * of_one]
    table = order.reshape(batch, of_one).int()
    found = []
    for cache in (key, value):
        pages = cache.new_full((batch * of_one + 3, heads, page_size, cache.shape[3]), torch.nan)
        for b in range(batch):
            for place in range(keys):
                page = int(table[b, place // page_size])
                pages[page, :, place % page_size] = cache[b, :, place]
        found.append(pages)
    return found[0], found[1], table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "keys"), [(16, 200), (7, 50), (64, 130)])
def test_pages(page_size: int, keys: int, dtype: torch.dtype) -> None:
    query, key, value = operands(3, 4, keys, key_heads=2, queries=2, dtype=dtype)
    lengths = torch.tensor([keys, 0, keys // 3])
    pages, value_pages, table = paged(key, value, page_size)
    table[2, lengths[2] // page_size + 1 :] = -12345  # never read

    def own(query: Tensor, *_: Tensor) -> Tensor:
        return one_by_one()(query, key.to(query.dtype), value.to(query.dtype), lengths)

    inputs = (query, pages, value_pages, table, lengths)
    check(f"{page_size}", paged_decode_attention, own, inputs)


def test_pages_with_a_window_and_a_softcap() -> None:
    query, key, value = operands(2, 2, 150)
    lengths = torch.tensor([150, 60])
    settings: dict[str, Any] = {"window": 40, "softcap": 3.0}

    def own(query: Tensor, *_: Tensor) -> Tensor:
        wide = one_by_one(window=40, softcap=3.0)
        return wide(query, key.to(query.dtype), value.to(query.dtype), lengths)

    def ours(*inputs: Tensor) -> Tensor:
        return paged_decode_attention(*inputs, **settings)

    check("pages", ours, own, (query, *paged(key, value, 16), lengths))


@pytest.mark.parametrize("batch", [0, 2])
def test_without_sequences_or_keys(batch: int) -> None:
    query, key, value = operands(batch, 2, 0 if batch else 5)
    out = decode_attention(query, key, value)
    assert torch.equal(out, torch.zeros_like(query))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinities_stand_where_torch_has_them(special: float) -> None:
    query, key, value = operands(2, 2, 150)
    query[0, 0, 0, 3], value[1, 1, 149, 5] = special, special
    check("special", ours(), one_by_one(), (query, key, value))


def test_offsets_that_32_bits_do_not_hold() -> None:
    """Offsets that wrap around find the zeros in front."""
    apart = 2**27
    memory = torch.empty(2**31 + 20 * apart, dtype=torch.float16, device="cpu")
    inputs = [torch.randn(1, 1, 1, 16, dtype=torch.float16, device="cpu")]
    for shift in (0, 16):
        one = memory[2**31 + shift :].as_strided((1, 1, 20, 16), (0, 0, apart, 1))
        inputs.append(one.copy_(torch.randn(1, 1, 20, 16, device="cpu")))
    near = decode_attention(*(one.contiguous() for one in inputs))
    assert torch.equal(decode_attention(*inputs), near)
    pages = [one.transpose(0, 2) for one in inputs[1:]]
    table = torch.arange(20, dtype=torch.int32, device="cpu")[None]
    lengths = torch.tensor([20], device="cpu")
    assert torch.equal(paged_decode_attention(inputs[0], *pages, table, lengths), near)


@pytest.mark.plain
def test_gradients_come_from_plain_torch() -> None:
    query, key, value = operands(1, 1, 3, 2)
    inputs = [one.double().requires_grad_() for one in (query, key, value)]
    with launching.watched() as names:
        assert torch.autograd.gradcheck(decode_attention, inputs)
        decode_attention(query.requires_grad_(), key, value).sum().backward()
    assert query.grad is not None and not names


@pytest.mark.plain
def test_how_many_programs_share_a_sequence() -> None:
    card = architectures.named("sm90")
    assert configurations.splits(card, programs=264, keys=100_000) == 1
    assert configurations.splits(card, programs=8, keys=100_000) == 64
    assert configurations.splits(card, programs=8, keys=300) == 4
    assert configurations.splits(card, programs=1, keys=10**6) == configurations.MOST_SPLITS


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    query, key, value = operands(2, 4, 5, 8, key_heads=2)
    lengths = torch.tensor([1, 2])
    wrong: list[tuple[str, tuple, dict[str, Any]]] = [
        (r"query has four dimensions", (query[0], key, value), {}),
        (r"query has 1 to 8 tokens", (query.expand(2, 4, 9, 8), key, value), {}),
        (r"multiple of key's 2 heads, not 3", (query[:, :3], key, value), {}),
        (r"key has the head size", (query, key[..., :4], value), {}),
        (r"key has the batch", (query, key[:1], value[:1]), {}),
        (r"value is as key is", (query, key, value[:, :, :3]), {}),
        (r"lengths is int32 or int64 of \[2\]", (query, key, value), {"lengths": lengths[:1]}),
        (r"lengths is int32 or int64", (query, key, value), {"lengths": lengths.float()}),
        (r"window is None or at least 0", (query, key, value), {"window": -1}),
        (r"softcap is above 0", (query, key, value), {"softcap": -1.0}),
    ]
    for message, operands_of_it, settings in wrong:
        with pytest.raises(KernelArgumentError, match=message):
            decode_attention(*operands_of_it, **settings)
    with pytest.raises(KernelArgumentError, match=r"page_table is int32 or int64 of \[2, 3\]"):
        paged_decode_attention(query, key, value, torch.ones(1, 3, dtype=torch.int32), lengths)


def test_the_operators_keep_the_rules_of_torch() -> None:
    query, key, value = operands(2, 2, 150)
    lengths = torch.tensor([150, 60])
    settings = (0.25, None, None)
    torch.library.opcheck(
        torch.ops.triton_kernels.decode_attention.default, (query, key, value, lengths, *settings)
    )
    torch.library.opcheck(
        torch.ops.triton_kernels.paged_decode_attention.default,
        (query, *paged(key, value, 16), lengths, *settings),
    )
