"""Rotary embedding, with and without norms, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DTYPES, check
from triton_kernels import launching, rope
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import rope as family

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
ROTATION = ["rope_forward_kernel", "rope_forward_kernel"]
WITH_NORMS = ["rope_forward_kernel", "rope_norm_backward_kernel"]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def torchs_rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Pair:
    """As models write it, with tables of full width."""
    width, turn = cos.shape[-1], rotate_pairs if interleaved else rotate_half
    if interleaved:
        cos, sin = (table[..., : width // 2].repeat_interleave(2, -1) for table in (cos, sin))
    cos, sin = (table.unsqueeze(-3) for table in (cos, sin))
    found = []
    for x, weight in ((query, query_norm), (key, key_norm)):
        x = x if weight is None else functional.rms_norm(x, x.shape[-1:], weight, eps)
        turning, rest = x[..., :width], x[..., width:]
        turned = turning * cos + turn(turning) * sin
        found.append(torch.cat((turned, rest), -1).to(query.dtype))
    return found[0], found[1]


def tables(*lead: int, width: int, dtype: torch.dtype = torch.float32) -> Pair:
    angle = torch.rand(*lead, width // 2) * 6
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def heads(batch: int, n: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, n, tokens, size, dtype=dtype, requires_grad=True)


def both(**fixed: object) -> tuple[Callable[..., Pair], Callable[..., Pair]]:
    """Ours and torch's, with these arguments."""

    def ours(*given: Tensor) -> Pair:
        return rope(*given, **fixed)  # type: ignore[arg-type]

    def torchs(*given: Tensor) -> Pair:
        return torchs_rope(*given, **fixed)  # type: ignore[arg-type]

    return ours, torchs


def with_norms(compute: Callable[..., Pair], **fixed: object) -> Callable[..., Pair]:
    def call(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor) -> Pair:
        named = dict(zip(("query_norm", "key_norm"), norms, strict=True))
        return compute(query, key, cos, sin, **named, **fixed)

    return call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 4, 5, 2, 16), (1, 3, 2, 3, 20)])
def test_rope(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype) -> None:
    batch, n, tokens, fewer, size = shape
    query, key = heads(batch, n, tokens, size, dtype), heads(batch, fewer, tokens, size, dtype)
    inputs = (query, key, *tables(tokens, width=size, dtype=dtype))
    check(f"{shape}", *both(interleaved=interleaved), inputs, launches=ROTATION)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 6])
def test_a_norm_before_the_rotation(width: int, interleaved: bool, dtype: torch.dtype) -> None:
    query, key = heads(2, 5, 3, 16, dtype), heads(2, 2, 3, 16, dtype)
    norms = torch.randn(2, 16, dtype=dtype)
    inputs = (query, key, *tables(2, 3, width=width, dtype=dtype))
    weights = [norm.clone().requires_grad_() for norm in norms]
    ours, torchs = (with_norms(f, interleaved=interleaved) for f in (rope, torchs_rope))
    check(f"norm, {width}", ours, torchs, (*inputs, *weights), launches=WITH_NORMS)


@pytest.mark.parametrize("which", ["query_norm", "key_norm"])
def test_a_norm_of_one_of_the_two(which: str) -> None:
    weight = torch.randn(12, requires_grad=True)
    inputs = (heads(1, 3, 4, 12), heads(1, 1, 4, 12), *tables(4, width=12), weight)

    def normed(compute: Callable[..., Pair]) -> Callable[..., Pair]:
        return lambda *given: compute(*given[:4], **{which: given[4]}, eps=0.0)

    check(which, normed(rope), normed(torchs_rope), inputs, launches=WITH_NORMS)


def test_many_heads_in_several_tiles() -> None:
    weights = torch.randn(2, 256)
    inputs = (heads(1, 37, 2, 256), heads(1, 9, 2, 256), *tables(2, width=256))
    check("many", *both(), inputs, launches=ROTATION)
    weights = [weight.clone().requires_grad_() for weight in weights]
    ours, torchs = (with_norms(compute, eps=0.0) for compute in (rope, torchs_rope))
    check("many", ours, torchs, (*inputs, *weights), launches=WITH_NORMS)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 10, 18])
def test_partial_rotation(width: int, interleaved: bool) -> None:
    inputs = (heads(2, 3, 4, 24), heads(2, 3, 4, 24), *tables(1, 4, width=width))
    check(f"{width} of 24", *both(interleaved=interleaved), inputs, launches=ROTATION)


def test_heads_of_odd_size_are_computed_in_plain_torch() -> None:
    inputs = (heads(1, 2, 3, 7), heads(1, 1, 3, 7), *tables(3, width=4))
    check("odd", *both(), inputs, launches=[])


@pytest.mark.parametrize("rotated", [8, 16])
def test_tables_of_half_width(rotated: int) -> None:
    def halved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        cos, sin = (table[..., : rotated // 2] for table in (cos, sin))
        return rope(query, key, cos, sin, rotated=None if rotated == 16 else rotated)

    inputs = (heads(2, 2, 3, 16), heads(2, 1, 3, 16), *tables(3, width=rotated))
    check("half width", halved, torchs_rope, inputs, launches=ROTATION)


def test_half_a_head_with_tables_of_full_width() -> None:
    def half_of_it(*given: Tensor) -> Pair:
        return rope(*given, rotated=8)

    inputs = (heads(2, 2, 3, 16), heads(2, 1, 3, 16), *tables(2, 3, width=8))
    check("half a head", half_of_it, torchs_rope, inputs, launches=ROTATION)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["tokens first", "packed", "transposed", "expanded", "strided"])
def test_layouts(layout: str, interleaved: bool) -> None:
    base = torch.randn(2, 3, 4, 24)
    query = {
        "tokens first": base.transpose(1, 2),
        "packed": base.view(2, 3, 96)[..., 8:80].view(2, 3, 3, 24).transpose(1, 2),
        "transposed": base[..., :4].transpose(0, 3),
        "expanded": base[:1, :1].expand(2, 3, 4, 24),
        "strided": base[..., ::2],
    }[layout]
    batch, _, tokens, size = query.shape
    key = torch.randn(batch, tokens, 2, size).transpose(1, 2).requires_grad_()
    cos, sin = tables(2 * tokens, width=size)
    inputs = (query.requires_grad_(), key, cos[::2], sin.t().contiguous().t()[1::2])
    check(layout, *both(interleaved=interleaved), inputs, launches=ROTATION)
    weights = [torch.randn(2 * size)[::2].requires_grad_() for _ in range(2)]
    ours, torchs = (with_norms(f, interleaved=interleaved) for f in (rope, torchs_rope))
    check(layout, ours, torchs, (*inputs, *weights), launches=WITH_NORMS)


def test_heads_stay_where_they_lie_in_a_token() -> None:
    query, key = torch.randn(2, 3, 4, 8).transpose(1, 2), torch.randn(2, 4, 3, 8)
    turned = rope(query, key, *tables(3, width=8))
    assert turned[0].transpose(1, 2).is_contiguous()
    assert turned[1].is_contiguous()


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_incoming_gradients_of_any_layout(layout: str) -> None:
    query, key, weight = heads(2, 3, 4, 8), heads(2, 1, 4, 8), torch.randn(8, requires_grad=True)
    inputs = (query, key, *tables(4, width=8))
    grad = {
        "expanded": torch.randn(4, 1).expand(2, 3, 4, 8),
        "transposed": torch.randn(8, 4, 3, 2).permute(3, 2, 1, 0),
    }[layout]
    for norms in ({}, {"query_norm": weight, "key_norm": weight}):
        got, right = (
            torch.autograd.grad(compute(*inputs, **norms)[0], query, grad)
            for compute in (rope, torchs_rope)
        )
        torch.testing.assert_close(got, right)


def test_one_result_that_nobody_uses() -> None:
    query, key, weight = heads(1, 2, 3, 8), heads(1, 2, 3, 8), torch.randn(8, requires_grad=True)
    turned = rope(query, key, *tables(3, width=8), query_norm=weight, key_norm=weight)
    got = torch.autograd.grad(turned[1].sum(), (query, key, weight))
    assert torch.equal(got[0], torch.zeros_like(query))
    assert bool(got[2].abs().sum() > 0)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    query, key, weight = heads(*shape), heads(*shape), torch.randn(8, requires_grad=True)
    for norms in ({}, {"query_norm": weight, "key_norm": weight}):
        turned = rope(query, key, *tables(shape[2], width=8), **norms)
        assert turned[0].shape == turned[1].shape == shape
        wanted = (query, key, *norms.values())[:3]
        grads = torch.autograd.grad(turned[0].sum() + turned[1].sum(), wanted)
        assert grads[0].shape == shape
        if norms:
            assert torch.equal(grads[2], torch.zeros_like(weight))


def test_nan_and_infinities_stand_where_torch_has_them() -> None:
    query, key = heads(1, 2, 3, 8), heads(1, 1, 3, 8)
    with torch.no_grad():
        query[0, 0, 0, 1], query[0, 1, 1, 6], key[0, 0, 2, 3] = torch.nan, torch.inf, -torch.inf
    cos, sin = tables(3, width=8)
    check("special", *both(), (query, key, cos, sin))


def test_tables_in_float32_for_narrow_heads() -> None:
    query, key = heads(1, 2, 3, 8, torch.float16), heads(1, 1, 3, 8, torch.float16)
    check("wide tables", *both(), (query, key, *tables(3, width=8)), launches=ROTATION)


@pytest.mark.plain
def test_the_meaning_is_that_of_models() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key, (cos, sin) = heads(2, 4, 5, 16), heads(2, 2, 5, 16), tables(2, 5, width=16)
    got = rope(query.double(), key.double(), cos.double(), sin.double())
    right = llama.apply_rotary_pos_emb(query.double(), key.double(), cos.double(), sin.double())
    torch.testing.assert_close(got, right)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    query, key, (cos, sin) = heads(2, 4, 3, 8), heads(2, 2, 3, 8), tables(3, width=8)
    with pytest.raises(KernelArgumentError, match=r"query is floats of \(batch, heads"):
        rope(query[0], key, cos, sin)
    with pytest.raises(KernelArgumentError, match="key is as query is"):
        rope(query, key[:1], cos, sin)
    with pytest.raises(KernelArgumentError, match=r"cos is \(3, width\) or \(2, 3, width\), not"):
        rope(query, key, cos[:2], sin)
    with pytest.raises(KernelArgumentError, match="sin is as cos is"):
        rope(query, key, cos, sin[:, :4])
    with pytest.raises(KernelArgumentError, match="rotated is an even part of the 8 numbers"):
        rope(query, key, cos, sin, rotated=10)
    with pytest.raises(KernelArgumentError, match=r"cos has 4 or 2 columns .* not 8"):
        rope(query, key, cos, sin, rotated=4)
    with pytest.raises(KernelArgumentError, match="key_norm has one number for each of a head's 8"):
        rope(query, key, cos, sin, key_norm=torch.randn(4))


@pytest.mark.plain
def test_float64_is_computed_in_plain_torch() -> None:
    query, key = heads(1, 2, 2, 6, torch.float64), heads(1, 1, 2, 6, torch.float64)
    cos, sin = tables(2, width=4, dtype=torch.float64)
    with launching.watched() as names:
        assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), (query, key))
    assert not names


@pytest.mark.plain
def test_tables_that_want_a_gradient_get_one() -> None:
    cos, sin = tables(3, width=8)
    turned, _ = rope(heads(1, 2, 3, 8), heads(1, 2, 3, 8), cos.requires_grad_(), sin)
    assert torch.autograd.grad(turned.sum(), cos)[0].shape == cos.shape


@pytest.mark.plain
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_backward_written_in_plain_torch(interleaved: bool) -> None:
    query, key = heads(2, 3, 2, 8, torch.float64), heads(2, 1, 2, 8, torch.float64)
    cos, sin = tables(2, 2, width=4, dtype=torch.float64)
    tables_of_pairs = cos[..., :2], sin[..., :2]
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    settings = (weight, None, 1e-6, 4, interleaved)
    out = family.rope_meaning(query, key, *tables_of_pairs, *settings, False)
    grads = [torch.randn_like(one) for one in out]
    right = torch.autograd.grad(out, (query, key, weight), grads)
    detached = query.detach(), key.detach()
    got = family.backward_meaning(*grads, *detached, *tables_of_pairs, *settings)
    torch.testing.assert_close(got[:3], right)


@pytest.mark.parametrize("has_norm", [False, True])
def test_the_operator_keeps_the_rules_of_torch(has_norm: bool) -> None:
    query, key = heads(2, 3, 2, 8).transpose(1, 2), heads(2, 3, 1, 8).transpose(1, 2)
    cos, sin = (table[..., :4].expand(2, -1, -1) for table in tables(1, 3, width=8))
    norm = torch.randn(8, requires_grad=True) if has_norm else None
    torch.library.opcheck(
        torch.ops.triton_kernels.rope_forward.default,
        (query.detach().requires_grad_(), key.detach().requires_grad_(), cos, sin)
        + (norm, norm, 1e-6, 8, False, False),
    )
