"""Cross entropy of hidden @ weight.t() + bias, without holding the logits of all tokens at once.

Tokens go through in chunks: torch's matrix product gives a chunk's logits, the kernels of cross
entropy its loss, then they write the gradient over the logits, and two more products take it to
hidden states and weights. So the gradients are there after the forward, up to the factor that the
backward brings. Only where each row has a factor of its own (reduction="none") the backward goes
through the chunks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_kernels import architectures, tuning
from triton_kernels._triton import jit, tl
from triton_kernels.configurations import linear_cross_entropy as configurations
from triton_kernels.errors import demand, described
from triton_kernels.families import cross_entropy
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, operator
from triton_kernels.rows import alike

# --- kernels --------------------------------------------------------------------------------------


@jit
def _scaled_kernel(x_ptr, factor_ptr, out_ptr, n_numbers, BLOCK: tl.constexpr):
    """One factor for all, which half precision may not hold: a loss scale, 1 / tokens."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n_numbers, 0.0).to(tl.float32)
    y = x * tl.load(factor_ptr)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < n_numbers)


# --- launchers ------------------------------------------------------------------------------------


class _Steps(NamedTuple):
    """What is done to a chunk of logits: by kernels, or in plain torch."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    write_gradient: Callable[..., None]


_KERNELS = _Steps(cross_entropy.launch_forward, cross_entropy.write_gradient)


def _launch_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the sum of all losses, its gradients by hidden, weight and bias: nothing where not asked)"""
    grad = _ones(hidden)
    wanted = (of_hidden, of_weight, of_bias)
    losses, *gradients = _in_chunks(
        _steps_for(hidden), grad, hidden, weight, bias, target, ignore_index, label_smoothing,
        chunk, wanted,
    )  # fmt: skip
    return losses.sum(), gradients[0], gradients[1], gradients[2]


def _launch_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
) -> Tensor:
    """The loss of each token."""
    return _in_chunks(
        _steps_for(hidden), None, hidden, weight, bias, target, ignore_index, label_smoothing,
        chunk, (False, False, False),
    )[0]  # fmt: skip


def _launch_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by hidden, weight and bias; `grad` is that of each token's loss."""
    wanted = (of_hidden, of_weight, of_bias)
    _, *gradients = _in_chunks(
        _steps_for(hidden), grad, hidden, weight, bias, target, ignore_index, label_smoothing,
        chunk, wanted,
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _launch_scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor, rounded once"""
    if x.dtype is torch.float64:
        return scaled_meaning(x, factor, dtype)
    out = alike(x, dtype)
    architecture = architectures.of(x.device)
    candidates = configurations.scaled(architecture)
    config = tuning.choose("linear_cross_entropy_scaled", architecture, (x.dtype,), candidates)
    launch(
        _scaled_kernel,
        (cdiv(x.numel(), config["BLOCK"]),),
        config,
        x_ptr=x.contiguous(),
        factor_ptr=factor,
        out_ptr=out,
        n_numbers=x.numel(),
    )
    return out


def _in_chunks(
    steps: _Steps,
    grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of each token, and the gradients that are wanted: of the weight and of the bias
    as float32 sums."""
    (tokens, _), classes = hidden.shape, weight.shape[0]
    options = (ignore_index, label_smoothing)
    losses = hidden.new_empty(tokens, dtype=_sum_dtype(hidden))
    of_hidden, of_weight, of_bias = _empty_gradients(hidden, weight, bias, wanted)
    if not tokens:
        of_weight.zero_()  # the first chunk would have been written over it
    room = hidden.new_empty((min(chunk, tokens), classes))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        here, targets = hidden[part], target[part]
        logits = room[: here.shape[0]]
        if bias is None:
            torch.mm(here, weight.t(), out=logits)
        else:
            torch.addmm(bias, here, weight.t(), out=logits)
        losses[part], _, lse, doubt = steps.forward(logits, targets, None, *options)
        if grad is None or not any(wanted):
            continue
        steps.write_gradient(logits, grad[part], logits, targets, None, lse, doubt, *options)
        if wanted[0]:
            torch.mm(logits, weight, out=of_hidden[part])
        if wanted[1]:
            _add_product(of_weight, logits.t(), here, first=start == 0)
        if wanted[2]:
            of_bias += logits.sum(0, dtype=of_bias.dtype)
    return losses, of_hidden, of_weight, of_bias


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    wide, nothing = _sum_dtype(hidden), hidden.new_empty
    of_weight = weight.new_empty(weight.shape, dtype=wide) if wanted[1] else nothing(0, dtype=wide)
    has_bias = bias is not None and wanted[2]
    of_bias = weight.new_zeros(weight.shape[0] if has_bias else 0, dtype=wide)
    return alike(hidden) if wanted[0] else nothing(0), of_weight, of_bias


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, where the total may have more digits than the two; the first is not added to
    what is there, which would be zeros to write and to read."""
    beta = 0 if first else 1
    if a.dtype is total.dtype:
        total.addmm_(a, b, beta=beta)
        return
    try:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):  # not on this device, or not in this version of torch
        product = torch.mm(a, b)
        total.copy_(product) if first else total.add_(product)


def _steps_for(hidden: Tensor) -> _Steps:
    return _PLAIN if hidden.dtype is torch.float64 else _KERNELS


def _ones(hidden: Tensor) -> Tensor:
    return hidden.new_ones(1, dtype=_sum_dtype(hidden)).expand(hidden.shape[0])


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


# --- meaning --------------------------------------------------------------------------------------


def sum_meaning(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In plain torch, in chunks as well: the sum of all losses and its gradients."""
    losses, *gradients = _in_chunks(
        _PLAIN, _ones(hidden), hidden, weight, bias, target, ignore_index, label_smoothing, chunk,
        (of_hidden, of_weight, of_bias),
    )  # fmt: skip
    return losses.sum(), gradients[0], gradients[1], gradients[2]


def rows_meaning(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
) -> Tensor:
    return _in_chunks(
        _PLAIN, None, hidden, weight, bias, target, ignore_index, label_smoothing, chunk,
        (False, False, False),
    )[0]  # fmt: skip


def backward_meaning(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _, *gradients = _in_chunks(
        _PLAIN, grad, hidden, weight, bias, target, ignore_index, label_smoothing, chunk,
        (of_hidden, of_weight, of_bias),
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def scaled_meaning(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(_sum_dtype(x)) * factor).to(dtype)


def _write_gradient_plainly(out: Tensor, grad: Tensor, *rest: Any) -> None:
    out.copy_(cross_entropy.backward_meaning(grad, *rest))


_PLAIN = _Steps(cross_entropy.forward_meaning, _write_gradient_plainly)


# --- registration ---------------------------------------------------------------------------------


def _fake_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = (of_hidden, of_weight, of_bias)
    total = hidden.new_empty((), dtype=_sum_dtype(hidden))
    return total, *_empty_gradients(hidden, weight, bias, wanted)


def _fake_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
) -> Tensor:
    return hidden.new_empty(hidden.shape[:1], dtype=_sum_dtype(hidden))


def _fake_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(hidden, weight, bias, (of_hidden, of_weight, of_bias))


def _fake_scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return alike(x, dtype)


_sum = operator(
    "linear_cross_entropy_sum", launcher=_launch_sum, meaning=sum_meaning, fake=_fake_sum
)
_rows = operator(
    "linear_cross_entropy_rows", launcher=_launch_rows, meaning=rows_meaning, fake=_fake_rows
)
_backward = operator(
    "linear_cross_entropy_backward",
    launcher=_launch_backward,
    meaning=backward_meaning,
    fake=_fake_backward,
)
_scaled = operator(
    "linear_cross_entropy_scaled",
    launcher=_launch_scaled,
    meaning=scaled_meaning,
    fake=_fake_scaled,
)


def _save_gradients(ctx, inputs, output) -> None:
    hidden, weight, *_, of_hidden, of_weight, of_bias = inputs
    _, *gradients = output
    ctx.wanted, ctx.dtypes = (of_hidden, of_weight, of_bias), (hidden.dtype, weight.dtype)
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    dtypes = (*ctx.dtypes, ctx.dtypes[1])
    found = [
        _scaled(gradient, grad, dtype) if wanted else None
        for gradient, wanted, dtype in zip(ctx.saved_tensors, ctx.wanted, dtypes, strict=True)
    ]
    return (*found, *(None,) * 7)


def _save_inputs(ctx, inputs, output) -> None:
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_rows(ctx, grad):
    hidden, weight, bias, target = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    options = (ctx.ignore_index, ctx.label_smoothing, ctx.chunk)
    found = _backward(grad, hidden, weight, bias, target, *options, *wanted)
    given = [
        gradient.to(weight.dtype) if is_wanted else None
        for gradient, is_wanted in zip(found, wanted, strict=True)
    ]
    return (*given, *(None,) * 4)


differentiable("linear_cross_entropy_sum", backward=_scale_gradients, saves=_save_gradients)
differentiable("linear_cross_entropy_rows", backward=_differentiate_rows, saves=_save_inputs)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.t() + bias, target), for tokens in any leading dimensions.

    It never holds the logits of more than `chunk` tokens: by default of at least 1024, and of as
    many as have half a gigabyte of logits. What it costs beside: a float32 gradient of the weight.
    """
    _demand_fits(hidden, weight, target, bias)
    cross_entropy.demand_reduction(reduction, label_smoothing)
    if chunk is not None and chunk < 1:  # Dynamo traces no text that is made of a number
        demand(False, f"chunk is a number of tokens, not {chunk}")
    rows = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    targets = target.reshape(-1)
    features = weight.shape[1] if _wants_gradient(weight) else 0
    chunk = chunk or configurations.chunk(
        rows.shape[0], weight.shape[0], features, hidden.dtype.itemsize
    )
    options = (ignore_index, label_smoothing, chunk)
    if reduction == "none":
        losses = _rows(rows, weight, bias, targets, *options)
        return losses.reshape(target.shape).to(hidden.dtype)
    wanted = [_wants_gradient(one) for one in (hidden, weight, bias)]
    total = _sum(rows, weight, bias, targets, *options, *wanted)[0]
    if reduction == "mean":
        total = _mean(total, (targets != ignore_index).sum())
    return total.to(hidden.dtype)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """NaN of no tokens, as in torch, where the gradient of none is zero nevertheless."""
    return torch.where(count == 0, math.nan, total / count.clamp_min(1))


def _wants_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _demand_fits(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    demand(
        hidden.dim() > 0 and hidden.is_floating_point(),
        f"hidden is a tensor of floats, its last dimension the features, not {described(hidden)}",
    )
    fits = weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
    demand(
        fits and weight.dtype is hidden.dtype,
        f"weight is (classes, features), {hidden.dtype} and with {hidden.shape[-1]} features as "
        f"hidden is, not {described(weight)}",
    )
    fits = target.dtype is torch.int64 and target.shape == hidden.shape[:-1]
    demand(fits, f"target is int64{list(hidden.shape[:-1])}, not {described(target)}")
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.dtype is hidden.dtype
        demand(
            fits,
            f"bias has one number for each of {weight.shape[0]} classes, not {described(bias)}",
        )
    devices = {one.device for one in (hidden, weight, target, bias) if one is not None}
    demand(len(devices) == 1, f"all are on one device, not on {', '.join(map(str, devices))}")
