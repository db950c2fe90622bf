"""Cross entropy of logits and class numbers, as torch.nn.functional.cross_entropy has it.

The forward reads the logits once; the backward reads them once more and writes the gradient, and
never into the logits. How unsure a row is of its true class, 1 - softmax, is summed from the other
classes and kept: taken from 1 it would be lost in rows that are nearly sure.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import Config
from triton_kernels.configurations import cross_entropy as configurations
from triton_kernels.errors import demand, described
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator
from triton_kernels.rows import alike, as_rows

REDUCTIONS = ("none", "mean", "sum")

# --- kernels --------------------------------------------------------------------------------------


@jit
def _cross_entropy_forward_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, share_ptr, lse_ptr, doubt_ptr,
    logits_stride, n_rows, n_columns, ignore_index, smoothing,
    SMOOTHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are read once, in parts; the sum so far is scaled when a higher logit comes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_is_in = row < n_rows
    target = tl.load(target_ptr + row, row_is_in, 0)
    counts = target != ignore_index
    is_class = (target >= 0) & (target < n_columns)
    true_ptr = logits_ptr + row * logits_stride + target
    true_logit = tl.load(true_ptr, row_is_in & is_class, 0.0).to(tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    others = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_is_in = column < n_columns
        is_in = row_is_in[:, None] & column_is_in[None, :]
        at = logits_ptr + row[:, None] * logits_stride + column[None, :]
        x = tl.load(at, is_in, float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 1))
        # Minus infinity is no place to shift from; +inf and NaN find their own way into the sum.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        is_other = column[None, :] != target[:, None]
        here = tl.where(is_other, tl.exp(x - shift[:, None]), 0.0)
        others = others * tl.exp(highest - shift) + tl.sum(here, 1)
        highest = higher
        if SMOOTHED:
            if weight_ptr is not None:
                x *= tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
            weighted += tl.sum(tl.where(is_in, x, 0.0), 1)
    true = tl.where(is_class, tl.exp(true_logit - shift), 0.0)
    log_sum = tl.log(others + true)
    odds = others / true
    # log(1 + odds), whose first digits would be lost with the 1 where the odds are small.
    series = odds * (1 - odds * (1 / 2 - odds * (1 / 3 - odds * (1 / 4 - odds / 5))))
    loss = tl.where(odds < 0.03, series, log_sum + (shift - true_logit))
    lse = shift + log_sum
    share = tl.where(counts, 1.0, 0.0)
    if weight_ptr is not None:
        share *= tl.load(weight_ptr + target, row_is_in & is_class, 0.0).to(tl.float32)
        loss *= share
    if SMOOTHED:
        weight_sum = n_columns * 1.0
        if weight_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
        loss = (1 - smoothing) * loss + smoothing / n_columns * (lse * weight_sum - weighted)
    loss = tl.where(is_class, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), row_is_in)
    tl.store(share_ptr + row, share, row_is_in)
    tl.store(lse_ptr + row, lse, row_is_in)
    tl.store(doubt_ptr + row, others / (others + true), row_is_in)


@jit
def _cross_entropy_backward_kernel(
    grad_ptr, logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, doubt_ptr, out_ptr,
    grad_stride, logits_stride, n_rows, n_columns, ignore_index, smoothing,
    SMOOTHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every number for itself: `out` may be the memory of the logits."""
    parts = tl.cdiv(n_columns, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    row_is_in, column_is_in = row < n_rows, column < n_columns
    target = tl.load(target_ptr + row, row_is_in, 0)
    counts = row_is_in & (target != ignore_index)
    is_class = (target >= 0) & (target < n_columns)
    grad = tl.load(grad_ptr + row * grad_stride, counts, 0.0)
    grad = tl.where(is_class, grad, float("nan"))
    lse = tl.load(lse_ptr + row, row_is_in, 0.0)
    doubt = tl.load(doubt_ptr + row, row_is_in, 0.0)
    at = logits_ptr + row[:, None] * logits_stride + column[None, :]
    # A row that does not count is not read.
    x = tl.load(at, counts[:, None] & column_is_in[None, :], 0.0).to(tl.float32)
    softmax = tl.exp(x - lse[:, None])
    is_true = column[None, :] == target[:, None]
    share = tl.full([ROWS], 1.0, tl.float32)
    if weight_ptr is not None:
        share = tl.load(weight_ptr + target, row_is_in & is_class, 0.0).to(tl.float32)
    if SMOOTHED:
        share *= 1 - smoothing
    result = share[:, None] * tl.where(is_true, -doubt[:, None], softmax)
    if SMOOTHED:
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, column_is_in, 0.0).to(tl.float32)[None, :]
            result += smoothing / n_columns * (softmax * tl.load(weight_sum_ptr) - weight)
        else:
            result += smoothing / n_columns * (softmax * n_columns - 1.0)
    result *= grad[:, None]
    # torch multiplies such a row by zero: that is zero, but for rows with NaN or infinity.
    result = tl.where(counts[:, None], result, (lse * 0.0)[:, None])
    at = out_ptr + row[:, None] * n_columns + column[None, :]
    is_in = row_is_in[:, None] & column_is_in[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), is_in)


# --- launchers ------------------------------------------------------------------------------------


def launch_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row: its loss, its weight in the mean, log(sum(exp)), 1 - softmax of its class."""
    if target.device.type == "cpu":  # a GPU answers with NaN
        _demand_classes(target, logits.shape[1], ignore_index)
    rows = as_rows(logits)
    found = _fake_forward(logits, target, weight, ignore_index, label_smoothing)
    losses, shares, lse, doubt = found
    config = _config("cross_entropy_forward", rows, configurations.forward)
    launch(
        _cross_entropy_forward_kernel,
        (cdiv(rows.shape[0], config["ROWS"]),),
        config,
        **_known(rows, target, weight, ignore_index, label_smoothing),
        loss_ptr=losses,
        share_ptr=shares,
        lse_ptr=lse,
        doubt_ptr=doubt,
    )
    return found


def launch_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    doubt: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The gradient of the logits; `grad` is that of each row's loss."""
    out = alike(logits)
    rows = as_rows(logits)
    write_gradient(out, grad, rows, target, weight, lse, doubt, ignore_index, label_smoothing)
    return out


def write_gradient(
    out: Tensor,
    grad: Tensor,
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    doubt: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Into `out`, which is contiguous and may be the logits themselves."""
    config = _config("cross_entropy_backward", rows, configurations.backward)
    tiles = cdiv(rows.shape[0], config["ROWS"]) * cdiv(rows.shape[1], config["BLOCK"])
    launch(
        _cross_entropy_backward_kernel,
        (tiles,),
        config,
        **_known(rows, target, weight, ignore_index, label_smoothing),
        grad_ptr=grad,
        grad_stride=grad.stride(0),
        lse_ptr=lse,
        doubt_ptr=doubt,
        out_ptr=out,
    )


def _known(
    rows: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> dict[str, Any]:
    smoothed = label_smoothing > 0
    has_sum = smoothed and weight is not None
    return {
        "logits_ptr": rows,
        "target_ptr": target.contiguous(),
        "weight_ptr": None if weight is None else weight.contiguous(),
        "weight_sum_ptr": weight.sum(dtype=torch.float32) if has_sum else None,  # type: ignore[union-attr]
        "logits_stride": rows.stride(0),
        "n_rows": rows.shape[0],
        "n_columns": rows.shape[1],
        "ignore_index": ignore_index,
        "smoothing": float(label_smoothing),
        "SMOOTHED": smoothed,
    }


def _demand_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise as torch does on a CPU."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _config(kernel: str, rows: Tensor, candidates_of: Any) -> Config:
    architecture = architectures.of(rows.device)
    candidates = candidates_of(architecture, rows.shape[1])
    return tuning.choose(kernel, architecture, (rows.shape[1], rows.dtype), candidates)


# --- meaning --------------------------------------------------------------------------------------


def forward_meaning(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In plain torch: loss, weight in the mean, log(sum(exp)) and 1 - softmax of each row."""
    wide = _widened(logits)
    weights = None if weight is None else _widened(weight)
    losses = functional.cross_entropy(
        wide,
        target,
        weights,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counts = target != ignore_index
    classes = target.where(counts, 0)
    shares = counts.to(wide.dtype) if weights is None else counts * weights[classes]
    lse = wide.logsumexp(-1)
    doubt = -torch.expm1(wide.gather(1, classes[:, None])[:, 0] - lse)
    return losses, shares, lse, doubt


def backward_meaning(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    doubt: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    wide = _widened(logits)
    counts = target != ignore_index
    classes = target.where(counts, 0)
    softmax = torch.exp(wide - lse[:, None])
    weights = wide.new_ones(wide.shape[1]) if weight is None else _widened(weight)
    is_true = torch.arange(wide.shape[1], device=wide.device) == classes[:, None]
    result = torch.where(is_true, -doubt[:, None], softmax)
    result = result * ((1 - label_smoothing) * weights[classes])[:, None]
    if label_smoothing > 0:
        result += label_smoothing / wide.shape[1] * (softmax * weights.sum() - weights)
    result = torch.where(counts[:, None], result * grad[:, None], (lse * 0.0)[:, None])
    return result.to(logits.dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses, shares, lse, doubt = (
        logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(4)
    )
    return losses, shares, lse, doubt


def _fake_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    doubt: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return alike(logits)


_forward = operator(
    "cross_entropy_forward", launcher=launch_forward, meaning=forward_meaning, fake=_fake_forward
)
_backward = operator(
    "cross_entropy_backward",
    launcher=launch_backward,
    meaning=backward_meaning,
    fake=_fake_backward,
)


def _save(ctx, inputs, output) -> None:
    logits, target, weight, ctx.ignore_index, ctx.label_smoothing = inputs
    _, shares, lse, doubt = output
    ctx.save_for_backward(logits, target, weight, lse, doubt)
    ctx.mark_non_differentiable(shares, lse, doubt)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return None, None, None, None, None
    found = _backward(grad, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing)
    return found, None, None, None, None


differentiable("cross_entropy_forward", backward=_differentiate, saves=_save)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log(softmax(logits)) of the target's classes, as torch.nn.functional.cross_entropy has it.

    Logits are (classes,), (rows, classes) or (rows, classes, ...). A target that is no class raises
    on a CPU and gives a loss of NaN on a GPU. Targets that are probabilities are left to torch.
    """
    _demand_fits(logits, target, weight)
    demand_reduction(reduction, label_smoothing)
    if target.is_floating_point() or _wants_gradient(weight) or not kernels_take(logits, weight):
        return functional.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    rows = logits.unsqueeze(0) if logits.dim() == 1 else logits.movedim(1, -1)
    rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    losses, shares, _, _ = _forward(rows, target.reshape(-1), weight, ignore_index, label_smoothing)
    if reduction == "none":
        return losses.reshape(target.shape).to(logits.dtype)
    total = losses.sum()
    return (total / shares.sum() if reduction == "mean" else total).to(logits.dtype)


def _wants_gradient(weight: Tensor | None) -> bool:
    """Then torch says that it has none."""
    return weight is not None and weight.requires_grad


def demand_reduction(reduction: str, label_smoothing: float) -> None:
    demand(reduction in REDUCTIONS, f"reduction is one of {', '.join(REDUCTIONS)}, not {reduction}")
    if not 0.0 <= label_smoothing <= 1.0:  # Dynamo traces no text that is made of a number
        demand(False, f"label_smoothing is between 0 and 1, not {label_smoothing}")


def _demand_fits(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    demand(
        logits.dim() > 0 and logits.is_floating_point(),
        f"logits is a tensor of floats with classes, not {described(logits)}",
    )
    classes = logits.shape[0] if logits.dim() == 1 else logits.shape[1]
    if target.is_floating_point():
        same = target.shape == logits.shape
        demand(
            same,
            f"a target of probabilities is as logits is ({described(logits)}), "
            f"not {described(target)}",
        )
    else:
        shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size()
        fits = target.dtype is torch.int64 and target.shape == shape
        demand(fits, f"target is int64{list(shape)} for these logits, not {described(target)}")
    demand(
        target.device == logits.device,
        f"target is on the device of logits, {logits.device}, not on {target.device}",
    )
    if weight is not None:
        fits = weight.shape == (classes,) and weight.dtype is logits.dtype
        demand(
            fits, f"weight has one number for each of {classes} classes, not {described(weight)}"
        )
