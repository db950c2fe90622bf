"""Rotary embedding of query and key in one launch, after an RMS norm of each head if wanted.

A program takes one token, so that its cosines and sines are read once for all heads. Everything
between the read and the write is float32. The inverse of a rotation is the rotation by the negative
angle, so without a norm the backward is the same kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.configurations import rope as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike

# --- kernels --------------------------------------------------------------------------------------
# Of a head, `first` and `second` are the numbers that make pairs. What is not rotated makes pairs
# as well, with an angle of zero, so that one tile holds the whole head.


@jit
def _rope_forward_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, query_out_ptr, key_out_ptr,
    query_strides, key_strides, cos_strides, sin_strides, query_out_strides, key_out_strides,
    n_tokens, query_heads, key_heads, half, n_pairs, eps,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, PARTIAL: tl.constexpr,
    VECTOR: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Axis 0 counts tokens; the programs of axis 1 share the heads of one."""
    batch, token = _place(tl.program_id(0), n_tokens)
    cos = _of_pairs(cos_ptr, cos_strides, batch, token, half, 1.0, PAIRS)
    sin = _of_pairs(sin_ptr, sin_strides, batch, token, half, 0.0, PAIRS)
    if INVERSE:
        sin = -sin
    _turn_heads(
        query_ptr + batch * query_strides[0] + token * query_strides[2], query_norm_ptr,
        query_out_ptr + batch * query_out_strides[0] + token * query_out_strides[2],
        query_strides, query_out_strides, query_heads, cos, sin, half, n_pairs, eps,
        INTERLEAVED, PARTIAL, VECTOR, HEADS, PAIRS,
    )  # fmt: skip
    _turn_heads(
        key_ptr + batch * key_strides[0] + token * key_strides[2], key_norm_ptr,
        key_out_ptr + batch * key_out_strides[0] + token * key_out_strides[2],
        key_strides, key_out_strides, key_heads, cos, sin, half, n_pairs, eps,
        INTERLEAVED, PARTIAL, VECTOR, HEADS, PAIRS,
    )  # fmt: skip


@jit
def _turn_heads(
    x_ptr, norm_ptr, out_ptr, x_strides, out_strides, n_heads, cos, sin, half, n_pairs, eps,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, VECTOR: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token's heads, HEADS at a time; the pointers are at that token."""
    for tile in range(tl.program_id(1), tl.cdiv(n_heads, HEADS), tl.num_programs(1)):
        head = tl.cast(tile, tl.int64) * HEADS + tl.arange(0, HEADS)
        is_in = head < n_heads
        first, second = _read(
            x_ptr + head * x_strides[1], is_in, x_strides[3], half, n_pairs,
            INTERLEAVED, PARTIAL, VECTOR, PAIRS,
        )  # fmt: skip
        if norm_ptr is not None:
            rstd = _rstd(first, second, n_pairs, eps)[:, None]
            by_first, by_second = _weights(
                norm_ptr, half, n_pairs, INTERLEAVED, PARTIAL, VECTOR, PAIRS
            )
            first, second = first * rstd * by_first, second * rstd * by_second
        _write(
            out_ptr + head * out_strides[1], is_in, out_strides[3],
            first * cos - second * sin, second * cos + first * sin, half, n_pairs,
            INTERLEAVED, PARTIAL, VECTOR, PAIRS,
        )  # fmt: skip


@jit
def _rope_norm_backward_kernel(
    query_grad_ptr, key_grad_ptr, query_ptr, key_ptr, cos_ptr, sin_ptr,
    query_norm_ptr, key_norm_ptr, query_out_ptr, key_out_ptr, query_partial_ptr, key_partial_ptr,
    query_grad_strides, key_grad_strides, query_strides, key_strides, cos_strides, sin_strides,
    query_out_strides, key_out_strides,
    n_places, n_tokens, query_heads, key_heads, half, n_pairs, eps,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, VECTOR: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Axis 1 is query or key: two sums of weights at once would be too many registers."""
    if tl.program_id(1) == 0:
        _turn_back(
            query_grad_ptr, query_ptr, cos_ptr, sin_ptr, query_norm_ptr, query_out_ptr,
            query_partial_ptr, query_grad_strides, query_strides, cos_strides, sin_strides,
            query_out_strides, n_places, n_tokens, query_heads, half, n_pairs, eps,
            INTERLEAVED, PARTIAL, VECTOR, HEADS, PAIRS,
        )  # fmt: skip
    else:
        _turn_back(
            key_grad_ptr, key_ptr, cos_ptr, sin_ptr, key_norm_ptr, key_out_ptr,
            key_partial_ptr, key_grad_strides, key_strides, cos_strides, sin_strides,
            key_out_strides, n_places, n_tokens, key_heads, half, n_pairs, eps,
            INTERLEAVED, PARTIAL, VECTOR, HEADS, PAIRS,
        )  # fmt: skip


@jit
def _turn_back(
    grad_ptr, x_ptr, cos_ptr, sin_ptr, norm_ptr, out_ptr, partial_ptr,
    grad_strides, x_strides, cos_strides, sin_strides, out_strides,
    n_places, n_tokens, n_heads, half, n_pairs, eps,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, VECTOR: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Each program takes every nth token and sums their part of the gradient of the weights."""
    first_sum, second_sum = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
    for place in range(tl.program_id(0), n_places, tl.num_programs(0)):
        batch, token = _place(place, n_tokens)
        cos = _of_pairs(cos_ptr, cos_strides, batch, token, half, 1.0, PAIRS)
        sin = _of_pairs(sin_ptr, sin_strides, batch, token, half, 0.0, PAIRS)
        first_sum, second_sum = _turn_heads_back(
            grad_ptr + batch * grad_strides[0] + token * grad_strides[2],
            x_ptr + batch * x_strides[0] + token * x_strides[2], norm_ptr,
            out_ptr + batch * out_strides[0] + token * out_strides[2],
            grad_strides, x_strides, out_strides, first_sum, second_sum,
            n_heads, cos, sin, half, n_pairs, eps, INTERLEAVED, PARTIAL, VECTOR, HEADS, PAIRS,
        )  # fmt: skip
    if norm_ptr is not None:
        one = tl.zeros([1], tl.int64)
        _write(
            partial_ptr + tl.program_id(0).to(tl.int64) * 2 * n_pairs + one, one == 0, 1,
            first_sum[None, :], second_sum[None, :], half, n_pairs,
            INTERLEAVED, PARTIAL, VECTOR, PAIRS,
        )  # fmt: skip


@jit
def _turn_heads_back(
    grad_ptr, x_ptr, norm_ptr, out_ptr, grad_strides, x_strides, out_strides, first_sum, second_sum,
    n_heads, cos, sin, half, n_pairs, eps,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, VECTOR: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The gradients of one token's heads; gives the sums with what this token adds."""
    for tile in range(tl.cdiv(n_heads, HEADS)):
        head = tl.cast(tile, tl.int64) * HEADS + tl.arange(0, HEADS)
        is_in = head < n_heads
        grad_first, grad_second = _read(
            grad_ptr + head * grad_strides[1], is_in, grad_strides[3], half, n_pairs,
            INTERLEAVED, PARTIAL, VECTOR, PAIRS,
        )  # fmt: skip
        first = grad_first * cos + grad_second * sin
        second = grad_second * cos - grad_first * sin
        if norm_ptr is not None:
            x_first, x_second = _read(
                x_ptr + head * x_strides[1], is_in, x_strides[3], half, n_pairs,
                INTERLEAVED, PARTIAL, VECTOR, PAIRS,
            )  # fmt: skip
            # With eps = 0 the rows beyond the last head would be 0 * inf.
            rstd = tl.where(is_in, _rstd(x_first, x_second, n_pairs, eps), 0.0)[:, None]
            x_first, x_second = x_first * rstd, x_second * rstd
            first_sum += tl.sum(first * x_first, 0)
            second_sum += tl.sum(second * x_second, 0)
            by_first, by_second = _weights(
                norm_ptr, half, n_pairs, INTERLEAVED, PARTIAL, VECTOR, PAIRS
            )
            first, second = first * by_first, second * by_second
            along = tl.sum(first * x_first + second * x_second, 1) / (2 * n_pairs)
            first = rstd * (first - x_first * along[:, None])
            second = rstd * (second - x_second * along[:, None])
        _write(
            out_ptr + head * out_strides[1], is_in, out_strides[3], first, second, half, n_pairs,
            INTERLEAVED, PARTIAL, VECTOR, PAIRS,
        )  # fmt: skip
    return first_sum, second_sum


@jit
def _place(place, n_tokens):
    """(batch, token): divided in 32 bits, which suffice and are many times faster."""
    return tl.cast(place // n_tokens, tl.int64), tl.cast(place % n_tokens, tl.int64)


@jit
def _of_pairs(ptr, strides, batch, token, half, beyond, PAIRS: tl.constexpr):
    pair = tl.arange(0, PAIRS)
    at = ptr + batch * strides[0] + token * strides[1] + pair.to(tl.int64) * strides[2]
    return tl.load(at, pair < half, beyond).to(tl.float32)[None, :]


@jit
def _rstd(first, second, n_pairs, eps):
    return tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * n_pairs) + eps)


@jit
def _weights(
    ptr, half, n_pairs, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, VECTOR: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    one = tl.zeros([1], tl.int64)
    return _read(ptr + one, one == 0, 1, half, n_pairs, INTERLEAVED, PARTIAL, VECTOR, PAIRS)


@jit
def _read(
    heads, is_in, stride, half, n_pairs, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    VECTOR: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(first, second) of the heads at these pointers, in float32."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        at = heads[:, None] + column.to(tl.int64) * stride
        both = tl.load(at, is_in[:, None] & (column < 2 * n_pairs), 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (heads.shape[0], PAIRS, 2)))
    else:
        first_at, second_at, pair_is_in = _halves(half, n_pairs, PARTIAL, VECTOR, PAIRS)
        is_pair = is_in[:, None] & pair_is_in
        first = tl.load(heads[:, None] + first_at * stride, is_pair, 0.0).to(tl.float32)
        second = tl.load(heads[:, None] + second_at * stride, is_pair, 0.0).to(tl.float32)
    return first, second


@jit
def _write(
    heads, is_in, stride, first, second, half, n_pairs, INTERLEAVED: tl.constexpr,
    PARTIAL: tl.constexpr, VECTOR: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    dtype = heads.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        at = heads[:, None] + column.to(tl.int64) * stride
        is_pair = is_in[:, None] & (column < 2 * n_pairs)
        tl.store(at, tl.interleave(first, second).to(dtype), is_pair)
    else:
        first_at, second_at, pair_is_in = _halves(half, n_pairs, PARTIAL, VECTOR, PAIRS)
        is_pair = is_in[:, None] & pair_is_in
        tl.store(heads[:, None] + first_at * stride, first.to(dtype), is_pair)
        tl.store(heads[:, None] + second_at * stride, second.to(dtype), is_pair)


@jit
def _halves(half, n_pairs, PARTIAL: tl.constexpr, VECTOR: tl.constexpr, PAIRS: tl.constexpr):
    """(column of each first, of each second, which pairs there are)"""
    pair = tl.arange(0, PAIRS)[None, :]
    if PARTIAL:
        turns = pair < half
        first = tl.where(turns, pair, pair + half)
        second = tl.where(turns, pair + half, pair + n_pairs)
        # Both jump at `half`, a multiple of VECTOR as n_pairs is: the compiler cannot see that.
        first = tl.max_contiguous(tl.multiple_of(first, [1, VECTOR]), [1, VECTOR])
        second = tl.max_contiguous(tl.multiple_of(second, [1, VECTOR]), [1, VECTOR])
    else:
        first, second = pair, pair + half
    return first.to(tl.int64), second.to(tl.int64), pair < n_pairs


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """(query, key), turned; `cos` and `sin` are (batch, tokens, rotated / 2)"""
    query_out, key_out = _turned_like(query), _turned_like(key)
    architecture = architectures.of(query.device)
    config = _config("rope_forward", query, configurations.forward)
    places = query.shape[0] * query.shape[2]
    heads = max(query.shape[1], key.shape[1])
    tiles = cdiv(heads, config["HEADS"])
    launch(
        _rope_forward_kernel,
        (places, configurations.programs_of_a_token(architecture, places, tiles)),
        config,
        **_known(query, key, cos, sin, query_norm, key_norm, eps, rotated, interleaved),
        **_out(query_out, key_out),
        INVERSE=inverse,
    )
    return query_out, key_out


def _launch_backward(
    query_grad: Tensor,
    key_grad: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query and key, and of the weights of their norms or nothing"""
    query_out, key_out = _turned_like(query), _turned_like(key)
    places = query.shape[0] * query.shape[2]
    programs = configurations.programs(architectures.of(query.device), places)
    partial = query.new_empty((2, programs, query.shape[3]), dtype=torch.float32)
    launch(
        _rope_norm_backward_kernel,
        (programs, 2),
        _config("rope_norm_backward", query, configurations.backward),
        **_known(query, key, cos, sin, query_norm, key_norm, eps, rotated, interleaved),
        **_out(query_out, key_out),
        query_grad_ptr=query_grad,
        key_grad_ptr=key_grad,
        query_partial_ptr=partial[0],
        key_partial_ptr=partial[1],
        query_grad_strides=query_grad.stride(),
        key_grad_strides=key_grad.stride(),
        n_places=places,
    )
    sums = _summed(partial[0], query_norm), _summed(partial[1], key_norm)
    return query_out, key_out, *sums


def _known(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
) -> dict[str, Any]:
    pairs = query.shape[3] // 2
    return {
        "query_ptr": query,
        "key_ptr": key,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "query_norm_ptr": None if query_norm is None else query_norm.contiguous(),
        "key_norm_ptr": None if key_norm is None else key_norm.contiguous(),
        "query_strides": query.stride(),
        "key_strides": key.stride(),
        "cos_strides": cos.stride(),
        "sin_strides": sin.stride(),
        "n_tokens": query.shape[2],
        "query_heads": query.shape[1],
        "key_heads": key.shape[1],
        "half": rotated // 2,
        "n_pairs": pairs,
        "eps": eps,
        "INTERLEAVED": interleaved,
        "PARTIAL": 2 * pairs > rotated,
        "VECTOR": math.gcd(16, rotated // 2, pairs),
        "PAIRS": power_of_two(pairs),
    }


def _out(query_out: Tensor, key_out: Tensor) -> dict[str, Any]:
    return {
        "query_out_ptr": query_out,
        "key_out_ptr": key_out,
        "query_out_strides": query_out.stride(),
        "key_out_strides": key_out.stride(),
    }


def _config(kernel: str, query: Tensor, candidates_of: Any) -> Config:
    architecture = architectures.of(query.device)
    heads, size = query.shape[1], query.shape[3]
    candidates = candidates_of(architecture, heads, size)
    return tuning.choose(kernel, architecture, (heads, size, query.dtype), candidates)


def _summed(partial: Tensor, weight: Tensor | None) -> Tensor:
    return partial.new_empty(0) if weight is None else partial.sum(0).to(weight.dtype)


def _turned_like(x: Tensor) -> Tensor:
    """Uninitialised; heads stay within a token if that is how they lie in `x`, else contiguous."""
    batch, heads, tokens, size = x.shape
    if heads > 1 and tokens > 1 and x.stride(2) > x.stride(1):
        return x.new_empty((batch, tokens, heads, size)).transpose(1, 2)
    return alike(x)


# --- meaning --------------------------------------------------------------------------------------


def rope_meaning(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """In plain torch: (query, key), turned by the angle, or back by it."""
    angle = _angle(query, cos, -sin if inverse else sin)
    turned = [
        _turned(_normed(_widened(x), weight, eps)[0], *angle, rotated, interleaved)
        for x, weight in ((query, query_norm), (key, key_norm))
    ]
    return turned[0].to(query.dtype), turned[1].to(key.dtype)


def backward_meaning(
    query_grad: Tensor,
    key_grad: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angle = _angle(query, cos, -sin)
    found, sums = [], []
    for grad, x, weight in ((query_grad, query, query_norm), (key_grad, key, key_norm)):
        back = _turned(_widened(grad), *angle, rotated, interleaved)
        if weight is None:
            sums.append(x.new_empty(0, dtype=torch.float32))
        else:
            normed, rstd = _normed(_widened(x), None, eps, always=True)
            sums.append((back * normed).sum((0, 1, 2)).to(weight.dtype))
            weighted = back * _widened(weight)
            back = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        found.append(back.to(x.dtype))
    return found[0], found[1], sums[0], sums[1]


def _angle(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """For each head the same, and as wide as the computation."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotated: int, interleaved: bool) -> Tensor:
    turning, rest = x[..., :rotated], x[..., rotated:]
    if interleaved:
        first, second = turning.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turning.chunk(2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, rest), -1)


def _normed(
    x: Tensor, weight: Tensor | None, eps: float, always: bool = False
) -> tuple[Tensor, Tensor]:
    """(normed, 1 / rms); without a weight there is no norm, unless `always`"""
    if weight is None and not always:
        return x, x
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * rstd
    return normed if weight is None else normed * _widened(weight), rstd


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    return _turned_like(query), _turned_like(key)


def _fake_backward(
    query_grad: Tensor,
    key_grad: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    rotated: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nothing = query.new_empty(0, dtype=torch.float32)
    sums = [nothing.clone() if one is None else alike(one) for one in (query_norm, key_norm)]
    return _turned_like(query), _turned_like(key), sums[0], sums[1]


_forward = operator(
    "rope_forward", launcher=_launch_forward, meaning=rope_meaning, fake=_fake_forward
)
_backward = operator(
    "rope_norm_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    query, key, cos, sin, query_norm, key_norm, *ctx.settings = inputs
    ctx.has_norms = query_norm is not None, key_norm is not None
    # A rotation alone forgets what it turned.
    kept = (query, key, query_norm, key_norm) if any(ctx.has_norms) else ()
    ctx.save_for_backward(cos, sin, *kept)


def _differentiate(ctx, query_grad, key_grad):
    cos, sin, *kept = ctx.saved_tensors
    eps, rotated, interleaved, inverse = ctx.settings
    nothing = None, None, None, None
    if not kept:
        settings = eps, rotated, interleaved, not inverse
        turned = _forward(query_grad, key_grad, cos, sin, None, None, *settings)
        return *turned, None, None, None, None, *nothing
    query, key, query_norm, key_norm = kept
    query_grad, key_grad, *sums = _backward(
        query_grad, key_grad, query, key, cos, sin, query_norm, key_norm, eps, rotated, interleaved
    )
    weights = [grad if has else None for grad, has in zip(sums, ctx.has_norms, strict=True)]
    return query_grad, key_grad, None, None, *weights, *nothing


differentiable("rope_forward", backward=_differentiate, saves=_save)


def rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    rotated: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(query, key) with rotary embedding; both are (batch, heads, tokens, size), of any strides.

    The first `rotated` numbers of each head are turned, the others stay. Pairs are (i, i + rotated
    / 2), or with `interleaved` (2 i, 2 i + 1). `cos` and `sin` are (tokens, width) or (batch,
    tokens, width), where width is `rotated`, the second half repeating the first (as Hugging Face
    has them; only the first half is read), or `rotated` / 2. If `rotated` is not given, tables of
    half the head's size are taken to be of half width, and all others to be of full width: partial
    rotation of exactly half a head with tables of full width has to be said.

    With weights in `query_norm` and `key_norm`, heads go through an RMS norm first. Results have
    the dtype of query and key, whatever that of the tables is.
    """
    _demand_fits(query, key, query_norm, key_norm)
    rotated = _rotated(query, cos, sin, rotated)
    cos, sin = (_pairs_of(table, query, rotated) for table in (cos, sin))
    takes = kernels_take(query, key, cos, sin, query_norm, key_norm) and query.shape[3] % 2 == 0
    fixed = not (cos.requires_grad or sin.requires_grad)
    compute = _forward if takes and fixed else rope_meaning
    return compute(query, key, cos, sin, query_norm, key_norm, eps, rotated, interleaved, False)


def _rotated(query: Tensor, cos: Tensor, sin: Tensor, rotated: int | None) -> int:
    batch, _, tokens, size = query.shape
    width = cos.shape[-1] if cos.dim() else 0
    demand(
        cos.shape in ((tokens, width), (batch, tokens, width), (1, tokens, width)),
        lambda: f"cos is ({tokens}, width) or ({batch}, {tokens}, width), not {described(cos)}",
    )
    demand(sin.shape == cos.shape, f"sin is as cos is ({described(cos)}), not {described(sin)}")
    if rotated is None:
        rotated = size if 2 * width == size else width
    demand(
        rotated % 2 == 0 and 0 < rotated <= size,
        f"rotated is an even part of the {size} numbers of a head, not {rotated}",
    )
    demand(
        width in (rotated, rotated // 2),
        f"cos has {rotated} or {rotated // 2} columns for {rotated} numbers that turn, not {width}",
    )
    return rotated


def _pairs_of(table: Tensor, query: Tensor, rotated: int) -> Tensor:
    """(batch, tokens, rotated / 2), without a copy."""
    half = table[..., : rotated // 2]
    half = half if half.dim() == 3 else half.unsqueeze(0)
    return half.expand(query.shape[0], -1, -1)


def _demand_fits(
    query: Tensor, key: Tensor, query_norm: Tensor | None, key_norm: Tensor | None
) -> None:
    demand(
        query.dim() == 4 and query.is_floating_point(),
        f"query is floats of (batch, heads, tokens, size), not {described(query)}",
    )
    batch, _, tokens, size = query.shape
    demand(
        key.dim() == 4 and key.dtype == query.dtype,
        f"key is as query is ({described(query)}) but for the number of heads, "
        f"not {described(key)}",
    )
    demand(
        (key.shape[0], key.shape[2], key.shape[3]) == (batch, tokens, size),
        f"key is as query is ({described(query)}) but for the number of heads, "
        f"not {described(key)}",
    )
    for name, weight in (("query_norm", query_norm), ("key_norm", key_norm)):
        if weight is not None:
            fits = weight.shape == (size,)
            demand(
                fits, f"{name} has one number for each of a head's {size}, not {described(weight)}"
            )
