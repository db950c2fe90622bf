"""Embedding: rows of a table by their number, and the sum of gradients for each row.

The backward sorts the ids, so that the gradients of one id are neighbours, and sums each run of
equal ids in a fixed order. Long runs are summed in parts, which a second kernel joins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import embedding as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import as_rows

# --- kernels --------------------------------------------------------------------------------------


@jit
def _embedding_forward_kernel(
    ids_ptr, weight_ptr, out_ptr, row_stride, column_stride, n_ids, n_rows, n_columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n_columns, BLOCK)
    place = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_in = (place < n_ids)[:, None] & (column < n_columns)[None, :]
    row = tl.load(ids_ptr + place, place < n_ids, 0).to(tl.int64)
    is_known = (row >= 0) & (row < n_rows)
    at = weight_ptr + row[:, None] * row_stride + column[None, :] * column_stride
    found = tl.load(at, is_in & is_known[:, None], float("nan"))
    tl.store(out_ptr + place[:, None] * n_columns + column[None, :], found, is_in)


@jit
def _embedding_backward_kernel(
    grad_ptr, sorted_ptr, order_ptr, out_ptr, partial_ptr,
    grad_stride, n_ids, n_rows, n_columns, padding,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each place among the sorted ids; those work where a part of a run begins."""
    across = tl.cdiv(n_columns, BLOCK)
    place = tl.program_id(0) // across
    column = (tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = tl.load(sorted_ptr + place).to(tl.int64)
    begins = (place == 0) | (tl.load(sorted_ptr + place - 1, place > 0, 0) != row)
    if _is_wanted(row, n_rows, padding) & (begins | (place % PART == 0)):
        end = tl.minimum((place // PART + 1) * PART, n_ids)
        total = tl.zeros([BLOCK], tl.float32)
        first = place
        goes_on = place < n_ids
        while goes_on:
            at = first + tl.arange(0, ROWS)
            same = (at < end) & (tl.load(sorted_ptr + at, at < end, 0) == row)
            source = tl.load(order_ptr + at, same, 0).to(tl.int64)
            is_in = same[:, None] & (column < n_columns)[None, :]
            at = grad_ptr + source[:, None] * grad_stride + column[None, :]
            total += tl.sum(tl.load(at, is_in, 0.0).to(tl.float32), 0)
            first += ROWS
            goes_on = (first < end) & (tl.load(sorted_ptr + first, first < end, 0) == row)
        crosses = (end < n_ids) & (tl.load(sorted_ptr + end, end < n_ids, 0) == row)
        if begins & (crosses == 0):
            at = out_ptr + row * n_columns + column
            tl.store(at, total.to(out_ptr.dtype.element_ty), column < n_columns)
        else:
            slot = (place // PART).to(tl.int64) * 2 + begins.to(tl.int64)
            tl.store(partial_ptr + slot * n_columns + column, total, column < n_columns)


@jit
def _embedding_join_kernel(
    sorted_ptr, out_ptr, partial_ptr, n_ids, n_rows, n_columns, padding,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each part; those work from whose part a run crosses into the next."""
    across = tl.cdiv(n_columns, BLOCK)
    part = tl.program_id(0) // across
    column = (tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column_is_in = column < n_columns
    after = (part + 1) * PART
    row = tl.load(sorted_ptr + after - 1).to(tl.int64)
    begins = (part == 0) | (tl.load(sorted_ptr + part * PART - 1, part > 0, 0) != row)
    crosses = tl.load(sorted_ptr + after) == row
    if _is_wanted(row, n_rows, padding) & begins & crosses:
        at = partial_ptr + (part.to(tl.int64) * 2 + 1) * n_columns + column
        total = tl.load(at, column_is_in, 0.0)
        goes_on = crosses
        while goes_on:
            place = after + tl.arange(0, ROWS) * PART
            same = (place < n_ids) & (tl.load(sorted_ptr + place, place < n_ids, 0) == row)
            slot = (place // PART).to(tl.int64) * 2
            parts = partial_ptr + slot[:, None] * n_columns + column[None, :]
            total += tl.sum(tl.load(parts, same[:, None] & column_is_in[None, :], 0.0), 0)
            after += ROWS * PART
            goes_on = (after < n_ids) & (tl.load(sorted_ptr + after, after < n_ids, 0) == row)
        at = out_ptr + row * n_columns + column
        tl.store(at, total.to(out_ptr.dtype.element_ty), column_is_in)


@jit
def _is_wanted(row, n_rows, padding):
    return (row >= 0) & (row < n_rows) & (row != padding)


# --- launchers ------------------------------------------------------------------------------------


def _launch_forward(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    out = _fake_forward(ids, weight, padding)
    n_columns = weight.shape[1]
    architecture = architectures.of(weight.device)
    candidates = configurations.forward(architecture, ids.numel(), n_columns)
    config = _chosen("embedding_forward", weight, candidates)
    launch(
        _embedding_forward_kernel,
        (cdiv(ids.numel(), config["ROWS"]) * cdiv(n_columns, config["BLOCK"]),),
        config,
        ids_ptr=ids.contiguous(),
        weight_ptr=weight,
        out_ptr=out,
        row_stride=weight.stride(0),
        column_stride=weight.stride(1),
        n_ids=ids.numel(),
        n_rows=weight.shape[0],
        n_columns=n_columns,
    )
    return out


def _launch_backward(grad: Tensor, ids: Tensor, n_rows: int, padding: int) -> Tensor:
    rows = as_rows(grad)
    n_ids, n_columns = rows.shape
    out = torch.zeros((n_rows, n_columns), dtype=grad.dtype, device=grad.device)
    if not rows.numel():
        return out
    part = configurations.PART
    ordered = torch.sort(ids.reshape(-1), stable=True)
    partial = rows.new_empty((cdiv(n_ids, part), 2, n_columns), dtype=torch.float32)
    known = {
        "sorted_ptr": ordered.values,
        "out_ptr": out,
        "partial_ptr": partial,
        "n_ids": n_ids,
        "n_rows": n_rows,
        "n_columns": n_columns,
        "padding": padding,
        "PART": part,
    }
    architecture = architectures.of(grad.device)
    candidates = configurations.backward(architecture, n_columns)
    config = _chosen("embedding_backward", rows, candidates)
    launch(
        _embedding_backward_kernel,
        (n_ids * cdiv(n_columns, config["BLOCK"]),),
        config,
        grad_ptr=rows,
        order_ptr=ordered.indices,
        grad_stride=rows.stride(0),
        **known,
    )
    candidates = configurations.joining(architecture, n_columns)
    config = _chosen("embedding_join", rows, candidates)
    # From the last part no run goes on.
    grid = ((cdiv(n_ids, part) - 1) * cdiv(n_columns, config["BLOCK"]),)
    launch(_embedding_join_kernel, grid, config, **known)
    return out


def _chosen(kernel: str, table: Tensor, candidates: tuple[Config, ...]) -> Config:
    architecture = architectures.of(table.device)
    return tuning.choose(kernel, architecture, (table.shape[1], table.dtype), candidates)


# --- meaning --------------------------------------------------------------------------------------


def embedding_meaning(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    """In plain torch, which raises IndexError on a CPU for an id that is not in the table."""
    return functional.embedding(ids, weight, None if padding < 0 else padding)


def backward_meaning(grad: Tensor, ids: Tensor, n_rows: int, padding: int) -> Tensor:
    rows = grad.reshape(ids.numel(), grad.shape[-1])
    wide = rows if grad.dtype is torch.float64 else rows.float()
    sums = wide.new_zeros((n_rows, rows.shape[1])).index_add_(0, ids.reshape(-1), wide)
    if padding >= 0:
        sums[padding] = 0
    return sums.to(grad.dtype)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _fake_backward(grad: Tensor, ids: Tensor, n_rows: int, padding: int) -> Tensor:
    return grad.new_empty((n_rows, grad.shape[-1]))


_forward = operator(
    "embedding_forward", launcher=_launch_forward, meaning=embedding_meaning, fake=_fake_forward
)
_backward = operator(
    "embedding_backward", launcher=_launch_backward, meaning=backward_meaning, fake=_fake_backward
)


def _save(ctx, inputs, output) -> None:
    ids, weight, ctx.padding = inputs
    ctx.n_rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _differentiate(ctx, grad):
    return None, _backward(grad, *ctx.saved_tensors, ctx.n_rows, ctx.padding), None


differentiable("embedding_forward", backward=_differentiate, saves=_save)


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` (rows, columns) with these numbers: ids.shape + (columns,).

    The row `padding_idx` (which may count from the end) gets no gradient. An id that is not in the
    table raises IndexError on a CPU; on a GPU nothing is read for it, NaN comes out, and it adds
    nothing to the gradient.
    """
    demand(
        ids.dtype in (torch.int32, torch.int64),
        f"ids are int32 or int64 numbers, not {described(ids)}",
    )
    demand(weight.dim() == 2, f"weight is (rows, columns), not {described(weight)}")
    n_rows = weight.shape[0]
    if padding_idx is not None:
        demand(
            -n_rows <= padding_idx < n_rows,
            f"padding_idx is one of {n_rows} rows, not {padding_idx}",
        )
        padding_idx %= n_rows
    takes = kernels_take(weight) and ids.device == weight.device
    compute = _forward if takes else embedding_meaning
    return compute(ids, weight, -1 if padding_idx is None else padding_idx)
