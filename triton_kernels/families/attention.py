"""Attention: softmax(query @ key^T * scale) @ value, without the matrix of weights in memory.

Each program keeps a tile of queries and goes along the keys; what it found is scaled down whenever
a larger score turns up. The forward saves the log of each row's sum of exponentials, from which the
backward computes the weights again. The gradients of keys and values are summed by a kernel of
their own, in a fixed order, so nothing is added atomically and every run gives the same numbers.

Query i may see key j where lower <= j - i <= upper: that is what `causal` and `window` come to.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.configurations import attention as configurations
from triton_kernels.device import tanh
from triton_kernels.errors import demand
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator

# --- kernels --------------------------------------------------------------------------------------
#
# In all of them <tensor>_batch, _head, _row and _column are strides; a row is one query or key.


@jit
def _tile(row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FAR: tl.constexpr):
    """Offsets within one tile: in 32 bits unless they do not fit, for that costs registers."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if FAR:
        row, column = row.to(tl.int64), column.to(tl.int64)
    return row[:, None] * row_stride + column[None, :] * column_stride


@jit
def _load(at, row_is_in, size: tl.constexpr, SIZE: tl.constexpr, EDGE: tl.constexpr):
    """A tile of rows of `size` numbers; only at an EDGE may rows be missing."""
    column_is_in = tl.arange(0, SIZE) < size
    if EDGE and size < SIZE:
        tile = tl.load(at, row_is_in[:, None] & column_is_in[None, :], 0.0)
    elif EDGE:
        tile = tl.load(at, row_is_in[:, None], 0.0)
    elif size < SIZE:
        tile = tl.load(at, column_is_in[None, :], 0.0)
    else:
        tile = tl.load(at)
    return tile


@jit
def _scored(products, mask, scale, softcap):
    """(scores in powers of two, how steep softcap is there) of products of queries and keys."""
    if softcap is None:
        scores, slope = products * (scale * 1.4426950408889634), 1.0
    else:
        bent = tanh(products * (scale / softcap))
        scores, slope = bent * (softcap * 1.4426950408889634), 1.0 - bent * bent
    if mask is not None and mask.dtype != tl.uint8:
        scores += mask.to(tl.float32) * 1.4426950408889634
    return scores, slope


@jit
def _only_seen(scores, row, column, mask, lower, upper):
    """-inf for what the queries (rows) may not see of the keys; row and column broadcast."""
    if lower is not None:
        scores = tl.where(column - row >= lower, scores, float("-inf"))
    if upper is not None:
        scores = tl.where(column - row <= upper, scores, float("-inf"))
    if mask is not None and mask.dtype == tl.uint8:
        scores = tl.where(mask != 0, scores, float("-inf"))
    return scores


@jit
def _attend(
    sums, total, top, query, key_ptr, value_ptr, mask_ptr, key_at, value_at, mask_at,
    key_row, value_row, mask_column, row, begin, end, n_queries, n_keys,
    scale, softcap, lower, upper, size: tl.constexpr, value_size: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The keys from `begin` to `end`; without EDGE, each of them is there and seen by all rows."""
    for start in range(begin, end, COLUMNS):
        first = tl.cast(start, tl.int64)
        column = start + tl.arange(0, COLUMNS)
        is_in = column < n_keys
        key = _load(key_ptr + first * key_row + key_at, is_in, size, SIZE, EDGE)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        mask = None
        if mask_ptr is not None:
            there = (row < n_queries)[:, None] & is_in[None, :]
            mask = tl.load(mask_ptr + first * mask_column + mask_at, there, 0)
        # Where nothing else is done to scores, scaling is left to the exponent: one pass less.
        factor = scale * 1.4426950408889634
        if softcap is not None or mask_ptr is not None:
            scores, _ = _scored(scores, mask, scale, softcap)
            factor = 1.0
        if EDGE:
            scores = tl.where(is_in[None, :], scores, float("-inf"))
            scores = _only_seen(scores, row[:, None], column[None, :], mask, lower, upper)
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        value = _load(value_ptr + first * value_row + value_at, is_in, value_size, VALUE_SIZE, EDGE)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(value.dtype), value, sums, input_precision=PRECISION)
        top = higher
    return sums, total, top


@jit
def _keys_of(first, last, n_keys, lower, upper, COLUMNS: tl.constexpr):
    """(begin, end) of the keys that any of the queries first..last sees."""
    begin, end = 0, n_keys
    if lower is not None:
        begin = tl.maximum(first + lower, 0) // COLUMNS * COLUMNS
    if upper is not None:
        end = tl.minimum(tl.maximum(last + upper + 1, 0), n_keys)
    return begin, end


@jit
def _attention_forward_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, lse_ptr,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    mask_batch, mask_head, mask_row, mask_column,
    out_batch, out_head, out_row, out_column,
    heads, group, n_queries, n_keys, scale, softcap, lower, upper,
    size: tl.constexpr, value_size: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_queries, ROWS)
    tile = tl.program_id(0) % tiles
    if upper is not None:
        tile = tiles - 1 - tile  # those with the most work first
    of_head = tl.program_id(0) // tiles
    head, batch = (of_head % heads).to(tl.int64), (of_head // heads).to(tl.int64)
    first = tile * ROWS
    row = first + tl.arange(0, ROWS)
    far = first.to(tl.int64)
    query_ptr += batch * query_batch + head * query_head + far * query_row
    key_ptr += batch * key_batch + head // group * key_head
    value_ptr += batch * value_batch + head // group * value_head
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch + head * mask_head + far * mask_row
    query_at = _tile(query_row, query_column, ROWS, SIZE, FAR)
    key_at = _tile(key_row, key_column, COLUMNS, SIZE, FAR)
    value_at = _tile(value_row, value_column, COLUMNS, VALUE_SIZE, FAR)
    mask_at = _tile(mask_row, mask_column, ROWS, COLUMNS, FAR)
    query = _load(query_ptr + query_at, row < n_queries, size, SIZE, True)

    sums = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    last = tl.minimum(first + ROWS, n_queries) - 1
    begin, end = _keys_of(first, last, n_keys, lower, upper, COLUMNS)
    # First the tiles that all queries see all of, as far as that can be told from their place.
    if mask_ptr is None and lower is None:
        whole = n_keys
        if upper is not None:
            whole = tl.minimum(tl.maximum(first + upper + 1, 0), n_keys)
        whole = whole // COLUMNS * COLUMNS
        sums, total, top = _attend(
            sums, total, top, query, key_ptr, value_ptr, mask_ptr, key_at, value_at, mask_at,
            key_row, value_row, mask_column, row, begin, whole, n_queries, n_keys,
            scale, softcap, lower, upper, size, value_size, SIZE, VALUE_SIZE, PRECISION,
            COLUMNS, False,
        )  # fmt: skip
        begin = whole
    sums, total, top = _attend(
        sums, total, top, query, key_ptr, value_ptr, mask_ptr, key_at, value_at, mask_at,
        key_row, value_row, mask_column, row, begin, end, n_queries, n_keys,
        scale, softcap, lower, upper, size, value_size, SIZE, VALUE_SIZE, PRECISION, COLUMNS, True,
    )  # fmt: skip

    nothing = total == 0.0  # of what was seen, the largest counts 1
    total = tl.where(nothing, 1.0, total)
    out = sums / total[:, None]
    # +inf for rows that see nothing: the backward's weights are exp(score - lse), which is 0 then.
    lse = tl.where(nothing, float("inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + of_head.to(tl.int64) * n_queries + row, lse, row < n_queries)
    out_ptr += batch * out_batch + head * out_head + far * out_row
    out_at = _tile(out_row, out_column, ROWS, VALUE_SIZE, FAR)
    is_in = (row < n_queries)[:, None] & (tl.arange(0, VALUE_SIZE) < value_size)[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), is_in)


@jit
def _attention_query_backward_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    mask_batch, mask_head, mask_row, mask_column,
    out_batch, out_head, out_row, out_column,
    grad_batch, grad_head, grad_row, grad_column,
    grad_query_batch, grad_query_head, grad_query_row, grad_query_column,
    heads, group, n_queries, n_keys, scale, softcap, lower, upper,
    size: tl.constexpr, value_size: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Also leaves sum(grad * out) of each row in `delta`, for the kernel of the keys."""
    tiles = tl.cdiv(n_queries, ROWS)
    tile = tl.program_id(0) % tiles
    if upper is not None:
        tile = tiles - 1 - tile
    of_head = tl.program_id(0) // tiles
    head, batch = (of_head % heads).to(tl.int64), (of_head // heads).to(tl.int64)
    first = tile * ROWS
    row = first + tl.arange(0, ROWS)
    row_is_in = row < n_queries
    far = first.to(tl.int64)
    query_ptr += batch * query_batch + head * query_head + far * query_row
    out_ptr += batch * out_batch + head * out_head + far * out_row
    grad_ptr += batch * grad_batch + head * grad_head + far * grad_row
    key_ptr += batch * key_batch + head // group * key_head
    value_ptr += batch * value_batch + head // group * value_head
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch + head * mask_head + far * mask_row
    query_at = _tile(query_row, query_column, ROWS, SIZE, FAR)
    out_at = _tile(out_row, out_column, ROWS, VALUE_SIZE, FAR)
    grad_at = _tile(grad_row, grad_column, ROWS, VALUE_SIZE, FAR)
    key_at = _tile(key_row, key_column, COLUMNS, SIZE, FAR)
    value_at = _tile(value_row, value_column, COLUMNS, VALUE_SIZE, FAR)
    mask_at = _tile(mask_row, mask_column, ROWS, COLUMNS, FAR)

    query = _load(query_ptr + query_at, row_is_in, size, SIZE, True)
    out = _load(out_ptr + out_at, row_is_in, value_size, VALUE_SIZE, True)
    grad = _load(grad_ptr + grad_at, row_is_in, value_size, VALUE_SIZE, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    of_row = of_head.to(tl.int64) * n_queries + row
    tl.store(delta_ptr + of_row, delta, row_is_in)
    lse = tl.load(lse_ptr + of_row, row_is_in, float("inf")) * 1.4426950408889634

    grad_query = tl.zeros([ROWS, SIZE], tl.float32)
    last = tl.minimum(first + ROWS, n_queries) - 1
    begin, end = _keys_of(first, last, n_keys, lower, upper, COLUMNS)
    for start in range(begin, end, COLUMNS):
        far = tl.cast(start, tl.int64)
        column = start + tl.arange(0, COLUMNS)
        is_in = column < n_keys
        key = _load(key_ptr + far * key_row + key_at, is_in, size, SIZE, True)
        value = _load(value_ptr + far * value_row + value_at, is_in, value_size, VALUE_SIZE, True)
        mask = None
        if mask_ptr is not None:
            there = row_is_in[:, None] & is_in[None, :]
            mask = tl.load(mask_ptr + far * mask_column + mask_at, there, 0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores, slope = _scored(products, mask, scale, softcap)
        scores = tl.where(is_in[None, :], scores, float("-inf"))
        scores = _only_seen(scores, row[:, None], column[None, :], mask, lower, upper)
        weights = tl.exp2(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None]) * slope
        grad_query = tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision=PRECISION)

    far = first.to(tl.int64)
    grad_query_ptr += batch * grad_query_batch + head * grad_query_head + far * grad_query_row
    at = grad_query_ptr + _tile(grad_query_row, grad_query_column, ROWS, SIZE, FAR)
    is_in = row_is_in[:, None] & (tl.arange(0, SIZE) < size)[None, :]
    tl.store(at, (grad_query * scale).to(grad_query_ptr.dtype.element_ty), is_in)


@jit
def _attention_key_backward_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, grad_ptr, lse_ptr, delta_ptr,
    grad_key_ptr, grad_value_ptr,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    mask_batch, mask_head, mask_row, mask_column,
    grad_batch, grad_head, grad_row, grad_column,
    grad_key_batch, grad_key_head, grad_key_row, grad_key_column,
    grad_value_batch, grad_value_head, grad_value_row, grad_value_column,
    heads, group, n_queries, n_keys, scale, softcap, lower, upper,
    size: tl.constexpr, value_size: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values; goes along the queries of every head that uses them."""
    tiles = tl.cdiv(n_keys, COLUMNS)
    tile = tl.program_id(0) % tiles
    of_head, key_heads = tl.program_id(0) // tiles, heads // group
    key_head_index, batch = (of_head % key_heads).to(tl.int64), (of_head // key_heads).to(tl.int64)
    first = tile * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    column_is_in = column < n_keys
    far = first.to(tl.int64)
    key_ptr += batch * key_batch + key_head_index * key_head + far * key_row
    value_ptr += batch * value_batch + key_head_index * value_head + far * value_row
    if mask_ptr is not None:
        mask_ptr += far * mask_column
    key_at = _tile(key_row, key_column, COLUMNS, SIZE, FAR)
    value_at = _tile(value_row, value_column, COLUMNS, VALUE_SIZE, FAR)
    query_at = _tile(query_row, query_column, ROWS, SIZE, FAR)
    grad_at = _tile(grad_row, grad_column, ROWS, VALUE_SIZE, FAR)
    mask_at = _tile(mask_column, mask_row, COLUMNS, ROWS, FAR)
    key = _load(key_ptr + key_at, column_is_in, size, SIZE, True)
    value = _load(value_ptr + value_at, column_is_in, value_size, VALUE_SIZE, True)

    grad_key = tl.zeros([COLUMNS, SIZE], tl.float32)
    grad_value = tl.zeros([COLUMNS, VALUE_SIZE], tl.float32)
    begin, end = 0, n_queries
    if upper is not None:
        begin = tl.maximum(first - upper, 0) // ROWS * ROWS
    if lower is not None:
        end = tl.minimum(tl.maximum(first + COLUMNS - lower, 0), n_queries)
    for member in range(group):
        head = key_head_index * group + member
        queries = query_ptr + batch * query_batch + head * query_head
        grads = grad_ptr + batch * grad_batch + head * grad_head
        of_rows = (batch * heads + head) * n_queries
        for start in range(begin, end, ROWS):
            far = tl.cast(start, tl.int64)
            row = start + tl.arange(0, ROWS)
            is_in = row < n_queries
            query = _load(queries + far * query_row + query_at, is_in, size, SIZE, True)
            grad = _load(grads + far * grad_row + grad_at, is_in, value_size, VALUE_SIZE, True)
            # Queries that are not there: their weights are exp(0 - inf).
            lse = tl.load(lse_ptr + of_rows + row, is_in, float("inf")) * 1.4426950408889634
            delta = tl.load(delta_ptr + of_rows + row, is_in, 0.0)
            mask = None
            if mask_ptr is not None:
                there = column_is_in[:, None] & is_in[None, :]
                at = mask_ptr + batch * mask_batch + head * mask_head + far * mask_row + mask_at
                mask = tl.load(at, there, 0)
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            scores, slope = _scored(products, mask, scale, softcap)
            scores = _only_seen(scores, row[None, :], column[:, None], mask, lower, upper)
            weights = tl.exp2(scores - lse[None, :])
            grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
            grad_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
            grad_scores = (weights * (grad_weights - delta[None, :]) * slope).to(query.dtype)
            grad_key = tl.dot(grad_scores, query, grad_key, input_precision=PRECISION)

    far = first.to(tl.int64)
    grad_key_ptr += batch * grad_key_batch + key_head_index * grad_key_head + far * grad_key_row
    at = grad_key_ptr + _tile(grad_key_row, grad_key_column, COLUMNS, SIZE, FAR)
    is_in = column_is_in[:, None] & (tl.arange(0, SIZE) < size)[None, :]
    tl.store(at, (grad_key * scale).to(grad_key_ptr.dtype.element_ty), is_in)
    grad_value_ptr += batch * grad_value_batch + key_head_index * grad_value_head
    grad_value_ptr += far * grad_value_row
    at = grad_value_ptr + _tile(grad_value_row, grad_value_column, COLUMNS, VALUE_SIZE, FAR)
    is_in = column_is_in[:, None] & (tl.arange(0, VALUE_SIZE) < value_size)[None, :]
    tl.store(at, grad_value.to(grad_value_ptr.dtype.element_ty), is_in)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor]:
    """(weighted values, log of the sum of exponentials of each row)"""
    out, lse = _fake_forward(query, key, value, mask, scale, softcap, lower, upper)
    batch, heads, n_queries, _ = query.shape
    known = _known(query, key, value, mask, scale, softcap, lower, upper)
    config = _config("attention_forward", configurations.forward, query, known)
    if config is None:
        return attention_meaning(query, key, value, mask, scale, softcap, lower, upper)
    launch(
        _attention_forward_kernel,
        (batch * heads * cdiv(n_queries, config["ROWS"]),),
        config,
        **known,
        out_ptr=out,
        lse_ptr=lse,
        **_strides(out=out),
        FAR=_is_far(config, query, key, value, mask, out),
    )
    return out, lse


def _launch_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the queries, of the keys, of the values)"""
    grad_query, grad_key, grad_value = (laid_like(one) for one in (query, key, value))
    batch, heads, n_queries, _ = query.shape
    known = _known(query, key, value, mask, scale, softcap, lower, upper)
    known |= {"grad_ptr": grad, "lse_ptr": lse, "delta_ptr": torch.empty_like(lse)}
    known |= _strides(grad=grad)
    read = (query, key, value, mask, grad)
    by_query = _config("attention_query_backward", configurations.query_backward, query, known)
    by_key = _config("attention_key_backward", configurations.key_backward, query, known)
    if by_query is None or by_key is None:
        settings = (scale, softcap, lower, upper)
        return backward_meaning(grad, query, key, value, mask, out, lse, *settings)
    launch(
        _attention_query_backward_kernel,
        (batch * heads * cdiv(n_queries, by_query["ROWS"]),),
        by_query,
        **known,
        out_ptr=out,
        grad_query_ptr=grad_query,
        **_strides(out=out, grad_query=grad_query),
        FAR=_is_far(by_query, *read, out, grad_query),
    )
    launch(
        _attention_key_backward_kernel,
        (batch * key.shape[1] * cdiv(key.shape[2], by_key["COLUMNS"]),),
        by_key,
        **known,
        grad_key_ptr=grad_key,
        grad_value_ptr=grad_value,
        **_strides(grad_key=grad_key, grad_value=grad_value),
        FAR=_is_far(by_key, *read, grad_key, grad_value),
    )
    return grad_query, grad_key, grad_value


def _known(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> dict[str, Any]:
    """The arguments that all kernels have."""
    n_queries, n_keys, size, value_size = *query.shape[2:3], *key.shape[2:], value.shape[3]
    return {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "mask_ptr": _as_bytes(mask),
        **_strides(query=query, key=key, value=value, mask=mask),
        "heads": query.shape[1],
        "group": query.shape[1] // max(1, key.shape[1]),
        "n_queries": n_queries,
        "n_keys": n_keys,
        "scale": scale,
        "softcap": softcap,
        # A bound that every query keeps costs nothing if kernels do not know of it.
        "lower": None if lower is None or lower <= 1 - n_queries else lower,
        "upper": None if upper is None or upper >= n_keys - 1 else upper,
        "size": size,
        "value_size": value_size,
        "SIZE": power_of_two(size, at_least=16),
        "VALUE_SIZE": power_of_two(value_size, at_least=16),
        "PRECISION": precision(architectures.of(query.device)),
    }


def _config(kernel: str, candidates_of: Any, query: Tensor, known: dict[str, Any]) -> Config | None:
    """None where no configuration is good: float32 and large heads on some architectures."""
    architecture = architectures.of(query.device)
    size = max(known["SIZE"], known["VALUE_SIZE"])
    queries = power_of_two(known["n_queries"], at_most=256)
    problem = (size, queries, query.dtype, known["PRECISION"])
    candidates = candidates_of(architecture, *problem)
    if known["mask_ptr"] is not None:
        candidates = configurations.beside_a_mask(candidates)
    names = [name for name in ("mask_ptr", "softcap", "lower", "upper") if known[name] is not None]
    return (
        tuning.choose(kernel, architecture, (*problem, *names), candidates) if candidates else None
    )


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    found = {}
    for name, tensor in tensors.items():
        strides = (0, 0, 0, 0) if tensor is None else tensor.stride()
        for axis, stride in zip(("batch", "head", "row", "column"), strides, strict=True):
            found[f"{name}_{axis}"] = stride
    return found


def _is_far(config: Config, *tensors: Tensor | None) -> bool:
    """Do offsets within one tile need 64 bits?"""
    most = max(256, config["ROWS"], config["COLUMNS"])
    given = [tensor for tensor in tensors if tensor is not None]
    return any(most * (one.stride(2) + one.stride(3)) >= 2**31 for one in given)


def precision(architecture: Architecture) -> str:
    """How products of float32 are computed: as torch is set."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 and architecture.backend == "cuda" else "ieee"


def laid_like(tensor: Tensor, size: int | None = None) -> Tensor:
    """Uninitialised, without holes, rows and heads in memory in the order that `tensor` has them:
    (batch, rows, heads, size) comes from a projection and goes into the next one without a copy."""
    batch, heads, rows, own = tensor.shape
    size = own if size is None else size
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((batch, rows, heads, size)).transpose(1, 2)
    return tensor.new_empty((batch, heads, rows, size))


# --- meaning --------------------------------------------------------------------------------------


def attention_meaning(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor]:
    """In plain torch: (weighted values, log of the sum of exponentials of each row)."""
    scores = _scores(query, key, mask, scale, softcap, lower, upper)[0]
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    out = weights @ _for_each_head(value, query)
    lse = scores.detach().logsumexp(-1).masked_fill(nothing.squeeze(-1), math.inf)
    return _laid(out.to(query.dtype), query), lse


def backward_meaning(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slope = _scores(query, key, mask, scale, softcap, lower, upper)
    weights = (scores - lse.unsqueeze(-1)).exp()
    wide = widened(grad)
    delta = (wide * widened(out)).sum(-1, keepdim=True)
    grad_scores = weights * (wide @ _for_each_head(value, query).mT - delta) * slope * scale
    grad_query = grad_scores @ _for_each_head(key, query)
    grad_key = _for_each_key_head(grad_scores.mT @ widened(query), key)
    grad_value = _for_each_key_head(weights.mT @ wide, value)
    gradients = ((grad_query, query), (grad_key, key), (grad_value, value))
    first, second, third = (_laid(found.to(of.dtype), of) for found, of in gradients)
    return first, second, third


def _scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor | float]:
    """(scores with -inf where a query may not look, how steep softcap is there)"""
    scores = widened(query) @ _for_each_head(key, query).mT * scale
    slope: Tensor | float = 1.0
    if softcap is not None:
        bent = (scores / softcap).tanh()
        scores, slope = bent * softcap, 1 - bent * bent
    distance = torch.arange(key.shape[2], device=key.device)
    distance = distance - torch.arange(query.shape[2], device=key.device).unsqueeze(-1)
    if mask is not None and mask.dtype is not torch.bool:
        scores = scores + mask
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    if lower is not None:
        scores = scores.masked_fill(distance < lower, -math.inf)
    if upper is not None:
        scores = scores.masked_fill(distance > upper, -math.inf)
    return scores, slope


def widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _for_each_head(of_key_heads: Tensor, query: Tensor) -> Tensor:
    group = query.shape[1] // max(1, of_key_heads.shape[1])
    return widened(of_key_heads).repeat_interleave(group, 1)


def _for_each_key_head(of_heads: Tensor, key: Tensor) -> Tensor:
    return of_heads.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)


def _laid(found: Tensor, like: Tensor) -> Tensor:
    return laid_like(like, found.shape[3]).copy_(found)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return laid_like(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


def _fake_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return laid_like(query), laid_like(key), laid_like(value)


_forward = operator(
    "attention_forward", launcher=_launch_forward, meaning=attention_meaning, fake=_fake_forward
)
_backward = operator(
    "attention_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    *tensors, scale, softcap, lower, upper = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = scale, softcap, lower, upper
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    return (*_backward(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 5)


differentiable("attention_forward", backward=_differentiate, saves=_save)

LARGEST_SIZE = 256  # of a head that kernels take


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | Literal["bottom_right"] = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(query @ key^T * scale + mask) @ value, on (batch, heads, rows, size) in any layout.

    There may be fewer heads of keys and values: each serves `heads / key_heads` heads in a row.

    mask: boolean (True is seen) or added to the scores; broadcast to (batch, heads, queries, keys).
    causal: query i sees keys up to the ith, as torch's `is_causal`; with "bottom_right" the last
        query sees up to the last key, as when the queries are the newest of a cache.
    window: (left, right): how many keys before and after its own place a query sees; None is all.
        Its own place is where `causal` has it.
    softcap: scores become softcap * tanh(scores / softcap), before the mask.

    A query that sees no key gives zeros. The result lies in memory as the queries do.
    """
    _demand_fits(query, key, value)
    _demand_settings(causal, window, softcap)
    scale = 1 / math.sqrt(max(1, query.shape[3])) if scale is None else scale
    lower, upper = _bounds(query.shape[2], key.shape[2], causal, window)
    if mask is not None:
        mask = _as_large_as_scores(mask, query, key)
    takes = (
        kernels_take(query, key, value)
        and (mask is None or _is_mask_of_kernels(mask, query))
        and all(0 < size <= LARGEST_SIZE for size in (query.shape[3], value.shape[3]))
        and scale > 0
    )
    compute = _forward if takes else attention_meaning
    return compute(query, key, value, mask, scale, softcap, lower, upper)[0]


def _bounds(
    queries: int,
    keys: int,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
) -> tuple[int | None, int | None]:
    """(least, largest) key seen, as distances from the query's row."""
    place = keys - queries if causal == "bottom_right" else 0
    left, right = window or (None, None)
    if causal:
        right = 0
    return None if left is None else place - left, None if right is None else place + right


def _as_large_as_scores(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    shape = (*query.shape[:3], key.shape[2])
    demand(
        mask.dtype is torch.bool or mask.is_floating_point(),
        f"mask is boolean or a tensor of floats, not {of(mask)}",
    )
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(sizes) == 4 and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))
    demand(fits, f"mask can be broadcast to {list(shape)}, not {of(mask)}")
    return mask.expand(shape)


def _is_mask_of_kernels(mask: Tensor, query: Tensor) -> bool:
    if mask.dtype is torch.bool:
        return mask.device == query.device
    return kernels_take(query, mask) and not (mask.requires_grad and torch.is_grad_enabled())


def _demand_fits(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        demand(
            tensor.dim() == 4 and tensor.is_floating_point(),
            f"{name} is (batch, heads, rows, size) of floats, not {of(tensor)}",
        )
        same = f"{name} is of query's {query.dtype}, not {of(tensor)}"
        demand(tensor.dtype == query.dtype, same)
    demand(
        key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3],
        f"key has the batch and the head size of query ({of(query)}), not {of(key)}",
    )
    demand(
        value.shape[:3] == key.shape[:3],
        f"value has the batch, the heads and the rows of key ({of(key)}), not {of(value)}",
    )
    heads, key_heads = query.shape[1], key.shape[1]
    demand(
        heads == key_heads or (0 < key_heads <= heads and heads % key_heads == 0),
        f"query has a multiple of key's {key_heads} heads, not {heads}",
    )


def _demand_settings(
    causal: bool | str, window: tuple[int | None, int | None] | None, softcap: float | None
) -> None:
    demand(
        causal in (True, False, "bottom_right"),
        f"causal is True, False or 'bottom_right', not {causal!r}",
    )
    if window is not None:
        demand(
            len(window) == 2 and all(one is None or one >= 0 for one in window),
            f"window is (left, right), each None or at least 0, not {window!r}",
        )
    demand(softcap is None or softcap > 0, f"softcap is above 0, not {softcap}")


def of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
