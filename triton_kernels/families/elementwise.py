"""Chains of elementwise operations in one kernel, which also computes their gradients.

A chain (see `triton_kernels.chains`) is known when the kernel is compiled. Tensors are read once,
broadcast by strides of zero; everything between is float32, and results are rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from triton_kernels import architectures, chains, tuning
from triton_kernels._triton import jit, tl, triton
from triton_kernels.chains import Step
from triton_kernels.configurations import elementwise as configurations
from triton_kernels.device import activated, activation_slope, tanh
from triton_kernels.errors import demand
from triton_kernels.launching import cdiv, launch
from triton_kernels.registration import differentiable, kernels_take, operator

# --- kernels --------------------------------------------------------------------------------------
# Functions that run while a kernel is compiled; each is hashed alone, so they share no code.

_while_compiling = getattr(triton, "constexpr_function", lambda function: function)


@_while_compiling
def _n_steps(CHAIN):
    return len([step for step in CHAIN.partition(">")[0].split(";") if step])


@_while_compiling
def _name(CHAIN, step):
    return CHAIN.partition(">")[0].split(";")[step].split()[0]


@_while_compiling
def _arity(CHAIN, step):
    return len(CHAIN.partition(">")[0].split(";")[step].split()) - 1


@_while_compiling
def _is_constant(CHAIN, step, place):
    return not CHAIN.partition(">")[0].split(";")[step].split()[place + 1].isdigit()


@_while_compiling
def _number(CHAIN, step, place):
    return int(CHAIN.partition(">")[0].split(";")[step].split()[place + 1])


@_while_compiling
def _constant(CHAIN, step, place):
    return float(CHAIN.partition(">")[0].split(";")[step].split()[place + 1])


@_while_compiling
def _output(CHAIN, place):
    return int(CHAIN.partition(">")[2].split()[place])


@_while_compiling
def _without_slope(name):
    return name[: -len("_slope")]


@jit
def _elementwise_kernel(
    tensors, outs, strides, n_rows, n_columns,
    CHAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of one of many matrices: `strides` are (matrix, row, column) for each tensor."""
    across, down = tl.cdiv(n_columns, BLOCK), tl.cdiv(n_rows, ROWS)
    tile = tl.program_id(0)
    matrix = tile.to(tl.int64) // (tl.cast(across, tl.int64) * down)
    row = ((tile // across % down).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_in = (row < n_rows) & (column < n_columns)
    values = ()
    for index in tl.static_range(len(tensors)):
        at = matrix * strides[index][0] + row * strides[index][1] + column * strides[index][2]
        value = tl.load(tensors[index] + at, is_in, 0.0).to(tl.float32)
        values = values + (value,)  # type: ignore[assignment]
    for step in tl.static_range(_n_steps(CHAIN)):
        value = _computed(values, CHAIN, step, ROWS, BLOCK)
        values = values + (value,)  # type: ignore[assignment]
    at = (matrix * n_rows + row) * n_columns + column
    for index in tl.static_range(len(outs)):
        dtype = outs[index].dtype.element_ty
        tl.store(outs[index] + at, values[_output(CHAIN, index)].to(dtype), is_in)


@jit
def _computed(
    values, CHAIN: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    name: tl.constexpr = _name(CHAIN, STEP)
    a = _operand(values, CHAIN, STEP, 0, ROWS, BLOCK)
    if _arity(CHAIN, STEP) == 1:
        y = _of_one(name, a)
    else:
        b = _operand(values, CHAIN, STEP, 1, ROWS, BLOCK)
        if _arity(CHAIN, STEP) == 2:
            y = _of_two(name, a, b)
        else:
            c = _operand(values, CHAIN, STEP, 2, ROWS, BLOCK)
            if name == "clamp":
                y = tl.where(a < b, b, a)
                y = tl.where(y > c, c, y)
            elif name == "share":
                y = tl.where(b < c, 0.0, tl.where(b == c, 0.5 * a, a))
            else:
                tl.static_assert(name == "within")
                d = _operand(values, CHAIN, STEP, 3, ROWS, BLOCK)
                y = tl.where((b >= c) & (b <= d), a, 0.0)
    return y


@jit
def _operand(
    values, CHAIN: tl.constexpr, STEP: tl.constexpr, PLACE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if _is_constant(CHAIN, STEP, PLACE):
        found = tl.full([ROWS, BLOCK], _constant(CHAIN, STEP, PLACE), tl.float32)
    else:
        found = values[_number(CHAIN, STEP, PLACE)]
    return found


@jit
def _of_one(NAME: tl.constexpr, a):
    """Comparisons are written so that NaN goes where torch lets it go."""
    if NAME == "neg":
        y = -a
    elif NAME == "abs":
        y = tl.abs(a)
    elif NAME == "sign":
        y = tl.where(a > 0.0, 1.0, tl.where(a < 0.0, -1.0, 0.0))
    elif NAME == "square":
        y = a * a
    elif NAME == "sqrt":
        y = tl.sqrt_rn(a)
    elif NAME == "rsqrt":
        y = tl.rsqrt(a)
    elif NAME == "exp":
        y = tl.exp(a)
    elif NAME == "log":
        y = tl.log(a)
    elif NAME == "relu":
        y = tl.where(a <= 0.0, 0.0, a)
    elif NAME == "sigmoid":
        y = tl.sigmoid(a)
    elif NAME == "tanh":
        y = tanh(a)
    elif NAME == "silu" or NAME == "gelu" or NAME == "gelu_tanh":
        y = activated(a, NAME)
    else:
        y = activation_slope(a, _without_slope(NAME))
    return y


@jit
def _of_two(NAME: tl.constexpr, a, b):
    if NAME == "add":
        y = a + b
    elif NAME == "sub":
        y = a - b
    elif NAME == "mul":
        y = a * b
    elif NAME == "div":
        y = tl.div_rn(a, b)
    elif NAME == "maximum":
        y = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "minimum":
        y = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(NAME == "pass")
        y = tl.where(b <= 0.0, 0.0, a)
    return y


# --- launchers ------------------------------------------------------------------------------------


def _launch(tensors: Sequence[Tensor], chain: str, like: Sequence[int]) -> list[Tensor]:
    """The outputs of the chain; each has the dtype of the tensor with this number, -1: float32"""
    outs = _fake(tensors, chain, like)
    shape = outs[0].shape
    order = _order(tensors, shape)
    given = [tensor.expand(shape).permute(order) for tensor in tensors]
    sizes, strides = _folded([shape[dim] for dim in order], [one.stride() for one in given])
    if len(sizes) > 3:
        given = [one.contiguous() for one in given]
        sizes, strides = _folded(list(given[0].shape), [one.stride() for one in given])
    n_matrices, n_rows, n_columns = [1] * (3 - len(sizes)) + sizes
    strides = [(0,) * (3 - len(sizes)) + one for one in strides]
    architecture = architectures.of(tensors[0].device)
    crossed = any(row == 1 and column > 1 for _, row, column in strides)
    config = tuning.choose(
        "elementwise",
        architecture,
        (n_rows, n_columns, crossed, chain.replace(" ", "_")),
        configurations.tiles(architecture, n_rows, n_columns, chain.count(";") + 1, crossed),
    )
    tiles = cdiv(n_rows, config["ROWS"]) * cdiv(n_columns, config["BLOCK"])
    launch(
        _elementwise_kernel,
        (n_matrices * tiles,),
        config,
        tensors=tuple(given),
        outs=tuple(outs),
        strides=tuple(strides),
        n_rows=n_rows,
        n_columns=n_columns,
        CHAIN=chain,
    )
    return outs


def _folded(
    sizes: list[int], strides: list[tuple[int, ...]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The same numbers in as few dimensions as the strides of all tensors allow."""
    kept: list[int] = []
    folded: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        if kept and all(
            mine[-1] == one[dim] * size for mine, one in zip(folded, strides, strict=True)
        ):
            kept[-1] *= size
            for mine, one in zip(folded, strides, strict=True):
                mine[-1] = one[dim]
        else:
            kept.append(size)
            for mine, one in zip(folded, strides, strict=True):
                mine.append(one[dim])
    return kept, [tuple(mine) for mine in folded]


def _order(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """The dimensions from far to near, as the first tensor of full size lies in memory."""
    own = list(range(len(shape)))
    for tensor in tensors:
        if list(tensor.shape) == list(shape):
            order = sorted(own, key=tensor.stride().__getitem__, reverse=True)
            return order if tensor.permute(order).is_contiguous() else own
    return own


# --- meaning --------------------------------------------------------------------------------------


def elementwise_meaning(tensors: Sequence[Tensor], chain: str, like: Sequence[int]) -> list[Tensor]:
    """In plain torch."""
    dtype = functools.reduce(torch.promote_types, [one.dtype for one in tensors], torch.float32)
    values = chains.computed(chains.read(chain), [tensor.to(dtype) for tensor in tensors])
    outs = _fake(tensors, chain, like)
    return [out.copy_(value) for out, value in zip(outs, values, strict=True)]


# --- registration ---------------------------------------------------------------------------------


def _fake(tensors: Sequence[Tensor], chain: str, like: Sequence[int]) -> list[Tensor]:
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
    order = _order(tensors, shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    lying = [shape[dim] for dim in order]
    device = tensors[0].device
    dtypes = [_wide(tensors) if number < 0 else tensors[number].dtype for number in like]
    return [torch.empty(lying, dtype=one, device=device).permute(back) for one in dtypes]


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    is_double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


_elementwise = operator("elementwise", launcher=_launch, meaning=elementwise_meaning, fake=_fake)


def _save(ctx, inputs, output) -> None:
    tensors, ctx.chain, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grads):
    tensors = ctx.saved_tensors
    wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    backward = chains.differentiated(chains.read(ctx.chain), len(tensors), wanted)
    full = grads[0].shape
    # Gradients of what was broadcast are summed, so they are not rounded before.
    like = [len(grads) + number if tensors[number].shape == full else -1 for number in wanted]
    found = _elementwise([*grads, *tensors], str(backward), like)
    gradients: list[Tensor | None] = [None] * len(tensors)
    for number, gradient in zip(wanted, found, strict=True):
        tensor = tensors[number]
        gradients[number] = gradient.sum_to_size(tensor.shape).to(tensor.dtype)
    return gradients, None, None


differentiable("elementwise", backward=_differentiate, saves=_save)


def elementwise(chain: Sequence[Step], *tensors: Tensor) -> Tensor:
    """What a chain of elementwise operations makes of these tensors, in one kernel.

    Each step is a tuple of an operation's name and its operands: an int is the number of a value
    (the tensors come first, then what each step computes), a float is a constant. A name alone
    takes the value before it. The last step is the result: `elementwise([("mul", 0, 1), ("add", 2,
    0.5), "gelu"], x, y)` is gelu(x * y + 0.5). Operations: add, sub, mul, div, maximum, minimum,
    clamp (with two constants), neg, abs, sign, square, sqrt, rsqrt, exp, log, relu, sigmoid, tanh,
    silu, gelu, gelu_tanh. Tensors are broadcast; the result has the dtype that torch promotes to.
    """
    demand(len(tensors) > 0, "a chain works on at least one tensor")
    for number, tensor in enumerate(tensors):
        demand(tensor.is_floating_point(), f"tensor {number} has floats, not {tensor.dtype}")
    written = str(chains.written(chain, len(tensors)))
    _demand_broadcast(tensors)
    dtypes = [tensor.dtype for tensor in tensors]
    promoted = functools.reduce(torch.promote_types, dtypes)
    like = [dtypes.index(promoted) if promoted in dtypes else -1]
    compute = _elementwise if kernels_take(*tensors) else elementwise_meaning
    return compute(list(tensors), written, like)[0]


def _demand_broadcast(tensors: Sequence[Tensor]) -> None:
    shapes = [list(tensor.shape) for tensor in tensors]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        demand(False, f"tensors are of shapes that broadcast, not {', '.join(map(str, shapes))}")
