"""attention, forward and backward, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.numerics import assert_contract
from tests.support.triton_kernels import DTYPES, check
from triton_kernels import attention, launching
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import attention as family

Tensor = torch.Tensor
KERNELS = [f"attention_{part}_kernel" for part in ("forward", "query_backward", "key_backward")]


def operands(
    batch: int = 1,
    heads: int = 2,
    queries: int = 20,
    size: int = 16,
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    of_keys = (batch, key_heads or heads, queries if keys is None else keys)
    shapes = (batch, heads, queries, size), (*of_keys, size), (*of_keys, value_size or size)
    made = [torch.randn(shape, dtype=dtype, requires_grad=gradients) for shape in shapes]
    return made[0], made[1], made[2]


def torchs_own(**settings: Any) -> Callable[..., Tensor]:
    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=query.shape[1] != key.shape[1], **settings
        )

    return compute


def ours(**settings: Any) -> Callable[..., Tensor]:
    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return attention(query, key, value, mask=mask, **settings)

    return compute


def spelled_out(seen: Tensor | None = None, softcap: float | None = None) -> Callable[..., Tensor]:
    """What torch has no word for."""

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ value

    return compute


def band(queries: int, keys: int, left: int, right: int, place: int = 0) -> Tensor:
    """Which keys a query sees, one by one."""
    rows = [
        [i + place - left <= j <= i + place + right for j in range(keys)] for i in range(queries)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(1, 1, 1), (3, 130, 8), (40, 37, 24), (32, 64, 80)]
)
def test_every_query_sees_every_key(queries: int, keys: int, size: int, dtype: torch.dtype) -> None:
    inputs = operands(1, 2, queries, size, keys=keys, dtype=dtype)
    check(f"{queries} {keys} {size}", ours(), torchs_own(), inputs, launches=KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (10, 70), (70, 35)])
def test_causal(queries: int, keys: int, dtype: torch.dtype) -> None:
    inputs = operands(1, 1, queries, 16, keys=keys, dtype=dtype)
    own = torchs_own(is_causal=True)
    check(f"{queries} {keys}", ours(causal=True), own, inputs, launches=KERNELS)


@pytest.mark.parametrize(("queries", "keys"), [(3, 50), (40, 40), (50, 40)])
def test_causal_from_the_bottom_right(queries: int, keys: int) -> None:
    own = spelled_out(band(queries, keys, keys + queries, 0, keys - queries))
    inputs = operands(1, 1, queries, 16, keys=keys)
    check(f"{queries} {keys}", ours(causal="bottom_right"), own, inputs, launches=KERNELS)


@pytest.mark.parametrize(
    ("left", "right", "causal"),
    [
        (5, 5, False),
        (40, 3, False),
        (1, 0, False),
        (17, 9, True),
        (None, 2, False),
        (4, None, False),
    ],
)
def test_window(left: int | None, right: int | None, causal: bool) -> None:
    many = 1000
    sides = many if left is None else left, many if right is None else right
    seen = band(70, 66, sides[0], 0 if causal else sides[1])
    inputs = operands(1, 1, 70, 16, keys=66)
    kernel = ours(window=(left, right), causal=causal)
    check(f"{left} {right} {causal}", kernel, spelled_out(seen), inputs, launches=KERNELS)


def test_window_from_the_bottom_right() -> None:
    own = spelled_out(band(20, 90, 40, 0, 70))
    inputs = operands(1, 1, 20, 16, keys=90)
    check("window", ours(causal="bottom_right", window=(40, None)), own, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_several_heads_share_keys(key_heads: int, dtype: torch.dtype) -> None:
    inputs = operands(1, 4, 40, 16, keys=35, key_heads=key_heads, dtype=dtype)
    own = torchs_own(is_causal=True)
    check(f"{key_heads}", ours(causal=True), own, inputs, launches=KERNELS)


def test_values_of_another_size() -> None:
    inputs = operands(1, 2, 40, 40, keys=35, value_size=12)
    check("size", ours(), torchs_own(), inputs, launches=KERNELS)


@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_scale(scale: float) -> None:
    check("scale", ours(scale=scale), torchs_own(scale=scale), operands())


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype: torch.dtype) -> None:
    query, key, value = operands(1, 2, 40, 16, dtype=dtype)
    query = (query.detach() * 3).requires_grad_()
    own = spelled_out(band(40, 40, 40, 0), softcap=5.0)
    check("softcap", ours(softcap=5.0, causal=True), own, (query, key, value), launches=KERNELS)


@pytest.mark.parametrize("shape", [(2, 2, 20, 35), (2, 1, 1, 35), (20, 35), (1, 2, 20, 1)])
@pytest.mark.parametrize("boolean", [True, False])
def test_mask(shape: tuple[int, ...], boolean: bool) -> None:
    seen = torch.rand(shape) > 0.3
    mask = seen if boolean else torch.randn(shape).masked_fill(~seen, -math.inf)
    inputs = (*operands(2, 2, 20, 16, keys=35), mask)

    def own(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        dense = mask.expand(*shape[:-1], 35).contiguous()  # torch on CUDA demands it of the keys
        return torchs_own()(query, key, value, dense)

    check(f"{shape}", ours(), own, inputs, launches=KERNELS)


def test_a_mask_beside_everything_else() -> None:
    mask = torch.randn(2, 1, 40, 36)
    own = spelled_out(band(40, 36, 20, 0), softcap=4.0)
    inputs = (*operands(2, 2, 40, 16, keys=36, key_heads=1), mask)
    check("all", ours(causal=True, window=(20, 0), softcap=4.0), own, inputs, launches=KERNELS)


def test_the_gradient_of_a_mask() -> None:
    inputs = (*operands(1, 2, 10, 8), torch.randn(10, 10, requires_grad=True))
    check("mask", ours(), torchs_own(), inputs, launches=[])


@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_sees_nothing_gives_zeros(boolean: bool) -> None:
    seen = torch.rand(20, 70) > 0.5
    seen[4], seen[17] = False, False
    mask = seen if boolean else torch.zeros(20, 70).masked_fill(~seen, -math.inf)
    query, key, value = operands(1, 2, 20, 16, keys=70)
    check("nothing", ours(), torchs_own(), (query, key, value, mask), launches=KERNELS)
    out = attention(query, key, value, mask=mask)
    gradient = torch.autograd.grad(out.sum(), query)[0]
    assert not out[:, :, 4].any() and not gradient[:, :, 4].any()


@pytest.mark.parametrize("layout", ["rows before heads", "transposed", "expanded", "strided"])
def test_layouts(layout: str) -> None:
    def laid(base: Tensor) -> Tensor:  # to (2, 2, 36, 16)
        found = {
            "rows before heads": lambda: base.reshape(2, 36, 2, 16).transpose(1, 2),
            "transposed": lambda: base.reshape(2, 2, 16, 36).mT,
            "expanded": lambda: base.reshape(2, 2, 36, 16)[:, :1].expand(2, 2, 36, 16),
            "strided": lambda: base.repeat_interleave(2).reshape(2, 2, 36, 32)[..., ::2],
        }[layout]()
        return found.detach().requires_grad_()

    inputs = tuple(laid(torch.randn(2 * 2 * 36 * 16)) for _ in range(3))
    check(layout, ours(causal=True), torchs_own(is_causal=True), inputs, launches=KERNELS)


def test_results_lie_in_memory_as_their_operands() -> None:
    query, key, value = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    out = attention(query.requires_grad_(), key.contiguous(), value)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.autograd.grad(out.sum(), query)[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_layouts_of_the_incoming_gradient(layout: str) -> None:
    inputs = operands(2, 2, 20, 16)
    grad = {
        "expanded": torch.randn(1, 1, 20, 1).expand(2, 2, 20, 16),
        "transposed": torch.randn(2, 2, 16, 20).mT,
    }[layout]
    got = torch.autograd.grad(attention(*inputs), inputs, grad)
    own = torch.autograd.grad(torchs_own()(*inputs), inputs, grad.contiguous())
    wide = [one.detach().double().requires_grad_() for one in inputs]
    truth = torch.autograd.grad(torchs_own()(*wide), wide, grad.double())
    assert_contract(got, own, truth, layout)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_empty(batch: int, queries: int, keys: int, causal: bool) -> None:
    inputs = operands(batch, 2, queries, 8, keys=keys)
    out = attention(*inputs, causal=causal)
    assert torch.equal(out, torch.zeros(batch, 2, queries, 8))
    for one, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert torch.equal(grad, torch.zeros_like(one))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinities_stand_where_torch_has_them(special: float) -> None:
    query, key, value = operands(1, 2, 20, 16, keys=70, gradients=False)
    query[0, 0, 3, 2] = special
    check("query", ours(), spelled_special, (query, key, value))
    query[0, 0, 3, 2], value[0, 1, 69, 5] = 0.5, special
    check("value", ours(), spelled_special, (query, key, value))


def spelled_special(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / 4).softmax(-1) @ value


def test_large_scores_do_not_overflow() -> None:
    query, key, value = operands(1, 2, 20, 16, dtype=torch.float16)
    inputs = ((query.detach() * 100).requires_grad_(), key, value)
    check("large", ours(), torchs_own(), inputs, launches=KERNELS)


@pytest.mark.parametrize(("rows", "apart"), [(20, 2**27), (140, 2**24)])
def test_offsets_that_32_bits_do_not_hold(rows: int, apart: int) -> None:
    """Within one tile, and from tile to tile. Offsets that wrap around find the zeros in front."""
    memory = torch.empty(2**31 + rows * apart, dtype=torch.float16, device="cpu")
    inputs = []
    for shift in (0, 16, 32):
        one = memory[2**31 + shift :].as_strided((1, 1, rows, 16), (0, 0, apart, 1))
        inputs.append(one.copy_(torch.randn(1, 1, rows, 16, device="cpu")))
    got = attention(*inputs, causal=True)
    near = attention(*(one.contiguous() for one in inputs), causal=True)
    assert torch.equal(got, near)


def test_gradients_are_the_same_in_every_run() -> None:
    inputs = operands(1, 2, 40, 16, key_heads=1)
    runs = [torch.autograd.grad(attention(*inputs).sum(), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    query, key, value = operands(2, 4, 5, 8, gradients=False)
    wrong: list[tuple[str, tuple, dict[str, Any]]] = [
        (r"query is \(batch, heads, rows, size\)", (query[0], key, value), {}),
        (r"key has the batch and the head size", (query, key[..., :4], value), {}),
        (r"value has the batch, the heads", (query, key, value[:, :, :3]), {}),
        (r"multiple of key's 3 heads", (query, key[:, :3], value[:, :3]), {}),
        (r"value is of query's torch.float32", (query, key, value.half()), {}),
        (r"mask can be broadcast to \[2, 4, 5, 5\]", (query, key, value), {"mask": query > 0}),
        (r"mask is boolean", (query, key, value), {"mask": torch.ones(5, 5, dtype=torch.int32)}),
        (r"causal is True, False or", (query, key, value), {"causal": "left"}),
        (r"window is \(left, right\)", (query, key, value), {"window": (-1, 2)}),
        (r"softcap is above 0", (query, key, value), {"softcap": 0.0}),
    ]
    for message, operands_of_it, settings in wrong:
        with pytest.raises(KernelArgumentError, match=message):
            attention(*operands_of_it, **settings)


@pytest.mark.plain
def test_float64_is_computed_in_plain_torch() -> None:
    inputs = [one.double().detach() for one in operands(1, 1, 3, 2, keys=4)]
    inputs = [one.requires_grad_() for one in inputs]
    with launching.watched() as names:
        assert torch.autograd.gradcheck(
            lambda *of: attention(*of, causal=True, window=(1, 0), softcap=2.0), inputs
        )
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_kernels_do_not_take(scale: float) -> None:
    inputs = operands(1, 1, 5, 8)
    check("scale", ours(scale=scale), torchs_own(scale=scale), inputs, launches=[])


@pytest.mark.plain
def test_the_meaning_of_the_backward_is_the_gradient_of_the_meaning() -> None:
    query, key, value = (
        one.detach().double().requires_grad_() for one in operands(2, 4, 7, 8, keys=9, key_heads=2)
    )
    mask = torch.randn(7, 9, dtype=torch.float64).expand(2, 4, 7, 9)
    mask = mask.masked_fill(torch.rand(7, 9) > 0.8, -math.inf)
    mask[:, :, 2] = -math.inf
    settings = (0.4, 3.0, -6, 4)
    out, lse = family.attention_meaning(query, key, value, mask, *settings)
    grad = torch.randn_like(out)
    truth = torch.autograd.grad(out, (query, key, value), grad)
    with torch.no_grad():
        found = family.backward_meaning(grad, query, key, value, mask, out, lse, *settings)
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("laid", [False, True])
def test_the_operator_keeps_the_rules_of_torch(laid: bool) -> None:
    query, key, value = operands(1, 2, 5, 8)
    if laid:
        query = torch.randn(1, 5, 2, 8).transpose(1, 2).requires_grad_()
    torch.library.opcheck(
        torch.ops.triton_kernels.attention_forward.default,
        (query, key, value, None, 0.3, None, None, 0),
    )
