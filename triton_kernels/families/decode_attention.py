"""Attention of the newest few tokens of each sequence to a cache of keys and values.

There are few queries and many keys, so several programs share the keys of one sequence; a second
kernel brings together what they found. Heads that share keys are rows of one tile: keys and values
are read once for all of them. For inference: where gradients are wanted, plain torch computes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.configurations import decode_attention as configurations
from triton_kernels.device import tanh
from triton_kernels.errors import demand
from triton_kernels.families.attention import (
    LARGEST_SIZE,
    attention_meaning,
    of,
    precision,
)
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import kernels_take, operator

# --- kernels --------------------------------------------------------------------------------------
#
# <tensor>_batch, _head, _row and _column are strides; in a cache of pages, _batch is a page's.


@jit
def _decode_attention_kernel(
    query_ptr, key_ptr, value_ptr, lengths_ptr, table_ptr, out_ptr, sums_ptr, lse_ptr,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    table_batch, table_page, n_queries, n_keys, key_heads, group, splits, page_size,
    scale, softcap, window,
    size: tl.constexpr, value_size: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one head of them. Row r is query r % n_queries of head r //
    n_queries in the group, so that rows of a sequence lie in memory as the result has them."""
    split = tl.program_id(0) % splits
    rows = group * n_queries
    tiles = tl.cdiv(rows, ROWS)
    of_head = tl.program_id(0) // splits // tiles
    key_head_index, batch = (of_head % key_heads).to(tl.int64), (of_head // key_heads).to(tl.int64)
    row = tl.program_id(0) // splits % tiles * ROWS + tl.arange(0, ROWS)
    row_is_in = row < rows
    token = (row % n_queries).to(tl.int64)

    length = n_keys
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + batch), n_keys).to(tl.int32)
    last_seen = (length - n_queries + token).to(tl.int32)  # a token sees the keys up to its own
    begin = 0
    if window is not None:
        begin = tl.maximum(length - n_queries - window, 0) // COLUMNS * COLUMNS
    share = tl.cdiv(tl.cdiv(tl.maximum(length - begin, 0), COLUMNS), splits) * COLUMNS
    begin += split * share
    end = tl.minimum(begin + share, length)

    key_ptr += key_head_index * key_head
    value_ptr += key_head_index * value_head
    if table_ptr is None:
        key_ptr += batch * key_batch
        value_ptr += batch * value_batch
    else:
        table_ptr += batch * table_batch
    along = tl.arange(0, SIZE).to(tl.int64)
    along_value = tl.arange(0, VALUE_SIZE).to(tl.int64)
    head = key_head_index * group + row // n_queries
    query_ptr += batch * query_batch
    query_at = (head * query_head + token * query_row)[:, None] + along[None, :] * query_column
    query = tl.load(query_ptr + query_at, row_is_in[:, None] & (along < size)[None, :], 0.0)

    sums = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_in = column < end
        if table_ptr is None:
            key_at = column.to(tl.int64) * key_row
            value_at = column.to(tl.int64) * value_row
        else:
            page = tl.load(table_ptr + column // page_size * table_page, is_in, 0).to(tl.int64)
            within = (column % page_size).to(tl.int64)
            key_at = page * key_batch + within * key_row
            value_at = page * value_batch + within * value_row
        # What lies in the cache beyond the length may be anything, NaN as well: it is not read.
        key_at = key_at[:, None] + along[None, :] * key_column
        key = tl.load(key_ptr + key_at, is_in[:, None] & (along < size)[None, :], 0.0)
        value_at = value_at[:, None] + along_value[None, :] * value_column
        in_tile = is_in[:, None] & (along_value < value_size)[None, :]
        value = tl.load(value_ptr + value_at, in_tile, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if softcap is None:
            scores *= scale * 1.4426950408889634
        else:
            bent = tanh(scores * (scale / softcap))
            scores = bent * (softcap * 1.4426950408889634)
        seen = is_in[None, :] & (column[None, :] <= last_seen[:, None])
        if window is not None:
            seen &= column[None, :] >= last_seen[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(value.dtype), value, sums, input_precision=PRECISION)
        top = higher

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    sums = sums / total[:, None]
    in_tile = row_is_in[:, None] & (along_value < value_size)[None, :]
    of_row = of_head.to(tl.int64) * rows + row
    if lse_ptr is None:
        at = out_ptr + of_row[:, None] * value_size + along_value[None, :]
        tl.store(at, sums.to(out_ptr.dtype.element_ty), in_tile)
    else:
        of_row = of_row * splits + split
        lse = tl.where(nothing, float("-inf"), top + tl.log2(total))
        tl.store(lse_ptr + of_row, lse, row_is_in)
        at = sums_ptr + of_row[:, None] * value_size + along_value[None, :]
        tl.store(at, sums, in_tile)


@jit
def _decode_attention_combine_kernel(
    sums_ptr, lse_ptr, out_ptr, splits,
    value_size: tl.constexpr, VALUE_SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What the splits of one row found, each weighed by its part of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    split, along = tl.arange(0, SPLITS), tl.arange(0, VALUE_SIZE)
    lse = tl.load(lse_ptr + row * splits + split, split < splits, float("-inf"))
    top = tl.max(lse, 0)
    parts = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(parts, 0)
    at = sums_ptr + (row * splits + split)[:, None] * value_size + along[None, :]
    is_in = (split < splits)[:, None] & (along < value_size)[None, :]
    sums = tl.sum(tl.load(at, is_in, 0.0) * parts[:, None], 0)
    out = sums / tl.where(total == 0.0, 1.0, total)
    at = out_ptr + row * value_size + along
    tl.store(at, out.to(out_ptr.dtype.element_ty), along < value_size)


# --- launchers ------------------------------------------------------------------------------------


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    return _launch_any(query, key, value, None, lengths, scale, softcap, window)


def _launch_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    return _launch_any(query, key_pages, value_pages, page_table, lengths, scale, softcap, window)


def _launch_any(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    batch, heads, n_queries, size = query.shape
    key_heads, value_size = key.shape[1], value.shape[3]
    page_size = key.shape[2]
    n_keys = page_size if table is None else table.shape[1] * page_size
    rows = heads // max(1, key_heads) * n_queries
    out = query.new_empty((batch, heads, n_queries, value_size))
    config = _config(query, value, rows, table is not None)
    if config is None:
        settings = (scale, softcap, window)
        if table is None:
            return decode_meaning(query, key, value, lengths, *settings)
        assert lengths is not None
        return paged_meaning(query, key, value, table, lengths, *settings)
    programs = batch * key_heads * cdiv(rows, config["ROWS"])
    reach = n_keys if window is None else min(n_keys, window + n_queries)
    splits = configurations.splits(architectures.of(query.device), programs, reach)
    several = splits > 1
    found = query.new_empty(
        (*out.shape[:3], splits, value_size if several else 0), dtype=torch.float32
    )
    lse = query.new_empty((*out.shape[:3], splits), dtype=torch.float32)
    launch(
        _decode_attention_kernel,
        (programs * splits,),
        config,
        query_ptr=query,
        key_ptr=key,
        value_ptr=value,
        lengths_ptr=None if lengths is None else lengths.contiguous(),
        table_ptr=table,
        out_ptr=out,
        sums_ptr=found if several else None,
        lse_ptr=lse if several else None,
        **_strides(query=query, key=key, value=value),
        table_batch=0 if table is None else table.stride(0),
        table_page=0 if table is None else table.stride(1),
        n_queries=n_queries,
        n_keys=n_keys,
        key_heads=key_heads,
        group=heads // max(1, key_heads),
        splits=splits,
        page_size=page_size,
        scale=scale,
        softcap=softcap,
        window=window,
        size=size,
        value_size=value_size,
        SIZE=power_of_two(size, at_least=16),
        VALUE_SIZE=power_of_two(value_size, at_least=16),
        PRECISION=precision(architectures.of(query.device)),
    )
    if several:
        launch(
            _decode_attention_combine_kernel,
            (batch * heads * n_queries,),
            Config({"SPLITS": splits}, warps=power_of_two(splits * value_size // 2048, at_most=8)),
            sums_ptr=found,
            lse_ptr=lse,
            out_ptr=out,
            splits=splits,
            value_size=value_size,
            VALUE_SIZE=power_of_two(value_size, at_least=16),
        )
    return out


def _config(query: Tensor, value: Tensor, rows: int, paged: bool) -> Config | None:
    architecture = architectures.of(query.device)
    size = power_of_two(max(query.shape[3], value.shape[3]), at_least=16)
    candidates = configurations.tiles(architecture, size, rows, query.dtype)
    problem = (size, power_of_two(rows, at_most=64), query.dtype, paged)
    if not candidates:
        return None
    return tuning.choose("decode_attention", architecture, problem, candidates)


def _strides(**tensors: Tensor) -> dict[str, int]:
    axes = ("batch", "head", "row", "column")
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }


# --- meaning --------------------------------------------------------------------------------------


def decode_meaning(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """In plain torch: attention with a mask of what each token sees."""
    place = torch.arange(key.shape[2], device=key.device)
    if lengths is None:
        lengths = torch.full(key.shape[:1], key.shape[2], device=key.device)
    lengths = lengths.clamp_max(key.shape[2])
    exists = place < lengths[:, None]
    token = torch.arange(query.shape[2], device=key.device) - query.shape[2]
    distance = place - (lengths[:, None] + token)[:, :, None]
    seen = exists[:, None] & (distance <= 0)
    if window is not None:
        seen &= distance >= -window
    mask = seen[:, None].expand(*query.shape[:3], key.shape[2])
    there = exists[:, None, :, None]  # beyond the length lies anything, NaN as well
    key, value = key.where(there, 0), value.where(there, 0)
    out, _ = attention_meaning(query, key, value, mask, scale, softcap, None, None)
    return out.contiguous()


def paged_meaning(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """In plain torch: the pages of each sequence side by side."""
    page_begins = torch.arange(page_table.shape[1], device=page_table.device) * key_pages.shape[2]
    known = page_begins < lengths[:, None]  # entries beyond them may be anything
    table = page_table.long().where(known, 0)

    def side_by_side(of_pages: Tensor) -> Tensor:
        found = of_pages[table].transpose(1, 2)  # batch, heads, page, row, size
        return found.flatten(2, 3)

    key, value = side_by_side(key_pages), side_by_side(value_pages)
    return decode_meaning(query, key, value, lengths, scale, softcap, window)


# --- registration ---------------------------------------------------------------------------------


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _fake_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    return _fake(query, key_pages, value_pages, lengths, scale, softcap, window)


_decode = operator("decode_attention", launcher=_launch, meaning=decode_meaning, fake=_fake)
_paged = operator(
    "paged_decode_attention", launcher=_launch_paged, meaning=paged_meaning, fake=_fake_paged
)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of the newest tokens (batch, heads, 1 to 8, size) to a cache of all.

    key, value: (batch, key_heads, keys, size); each of their heads serves `heads / key_heads`.
    lengths: (batch,) how many keys each sequence has, the queries' own included: the last query's
        is the last of them, and no query sees keys of later ones. None: the whole cache.
    window: how many keys before its own a query sees.
    softcap: scores become softcap * tanh(scores / softcap).

    Queries without a key give zeros. What the cache holds beyond the lengths is never read.
    """
    _demand_fits(query, key, value, softcap, window)
    demand(
        key.shape[0] == query.shape[0],
        f"key has the batch of query ({of(query)}), not {of(key)}",
    )
    if lengths is not None:
        _demand_whole_numbers("lengths", lengths, query.shape[:1])
    scale = _scale(query, scale)
    compute = _decode if _takes(scale, query, key, value, lengths) else decode_meaning
    return compute(query, key, value, lengths, scale, softcap, window)


def paged_decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`decode_attention` to a cache in pages, which sequences share out among them.

    key_pages, value_pages: (pages, key_heads, page_size, size).
    page_table: (batch, most pages of a sequence): key j of sequence b is row j % page_size of page
        page_table[b, j // page_size]. Entries beyond a sequence's length may be anything.
    """
    _demand_fits(query, key_pages, value_pages, softcap, window)
    _demand_whole_numbers("page_table", page_table, (query.shape[0], page_table.shape[-1]))
    _demand_whole_numbers("lengths", lengths, query.shape[:1])
    scale = _scale(query, scale)
    takes = _takes(scale, query, key_pages, value_pages, lengths, page_table)
    compute = _paged if takes else paged_meaning
    return compute(query, key_pages, value_pages, page_table, lengths, scale, softcap, window)


MOST_QUERIES = 8


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(max(1, query.shape[3])) if scale is None else scale


def _takes(
    scale: float, query: Tensor, key: Tensor, value: Tensor, *numbers: Tensor | None
) -> bool:
    tensors = (query, key, value)
    return (
        kernels_take(*tensors)
        and all(one is None or one.device == query.device for one in numbers)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and all(0 < size <= LARGEST_SIZE for size in (query.shape[3], value.shape[3]))
        and key.shape[2] > 0
        and scale > 0
    )


def _demand_fits(
    query: Tensor, key: Tensor, value: Tensor, softcap: float | None, window: int | None
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        demand(
            tensor.dim() == 4 and tensor.is_floating_point() and tensor.dtype == query.dtype,
            f"{name} has four dimensions, of floats of one dtype, not {of(tensor)}",
        )
    demand(
        0 < query.shape[2] <= MOST_QUERIES,
        f"query has 1 to {MOST_QUERIES} tokens of each sequence, not {query.shape[2]}",
    )
    heads, key_heads = query.shape[1], key.shape[1]
    demand(
        0 < key_heads <= heads and heads % key_heads == 0,
        f"query has a multiple of key's {key_heads} heads, not {heads}",
    )
    demand(
        key.shape[3] == query.shape[3],
        f"key has the head size of query ({of(query)}), not {of(key)}",
    )
    demand(value.shape[:3] == key.shape[:3], f"value is as key is ({of(key)}), not {of(value)}")
    demand(softcap is None or softcap > 0, f"softcap is above 0, not {softcap}")
    demand(window is None or window >= 0, f"window is None or at least 0, not {window}")


def _demand_whole_numbers(name: str, numbers: Tensor, shape: tuple[int, ...]) -> None:
    whole = numbers.dtype in (torch.int32, torch.int64)
    demand(
        whole and numbers.shape == shape,
        f"{name} is int32 or int64 of {list(shape)}, not {of(numbers)}",
    )
