"""What each operation means, on every target: plain torch that `unified` knows as a region.

There is no second dispatcher here. Called as they are, these run torch's own kernels (cuBLAS,
rocBLAS, MKL, oneDNN); inside of `torch.compile(backend="unified")` the providers take them. Every
operation checks its contract first: sizes, one floating dtype, one device, and row-major memory
(`lowering.layouts`). `lowering.reference` has the same operations in elementary steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lowering.errors import OperandError, unknown
from lowering.layouts import laid_out

Sizes = int | tuple[int, int]


# --- products -------------------------------------------------------------------------------------


def matmul2d(a: Tensor, b: Tensor, *, layout: str = "copy") -> Tensor:
    """(rows, inner) @ (inner, columns)."""
    a, b = _operands("matmul2d", layout, a=a, b=b)
    _ranks("matmul2d", 2, a=a, b=b)
    _demand(a.shape[1] == b.shape[0], "matmul2d", "columns of a and rows of b differ", a=a, b=b)
    return torch.mm(a, b)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: str = "copy"
) -> Tensor:
    """x times the transposed weight (out, in), and the bias (out,) to every row."""
    x, weight, bias = _operands("linear", layout, x=x, weight=weight, bias=bias)
    _ranks("linear", 2, weight=weight)
    _demand(
        x.dim() >= 1 and x.shape[-1] == weight.shape[1],
        "linear", "the last size of x and the columns of weight differ", x=x, weight=weight,
    )  # fmt: skip
    _fits_last("linear", weight.shape[0], bias=bias)
    return functional.linear(x, weight, bias)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: str = "copy",
) -> Tensor:
    """Images (batch, channels, height, width) with kernels (out, channels / groups, high, wide)."""
    x, weight, bias = _operands("conv2d", layout, images=True, x=x, weight=weight, bias=bias)
    _ranks("conv2d", 4, x=x, weight=weight)
    _demand(
        x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0,
        "conv2d", f"channels do not fit with groups={groups}", x=x, weight=weight,
    )  # fmt: skip
    _fits_last("conv2d", weight.shape[0], bias=bias)
    return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)


# --- elementwise ----------------------------------------------------------------------------------


def add(a: Tensor, b: Tensor, *, layout: str = "copy") -> Tensor:
    """Sums of elements; sizes as torch broadcasts them."""
    a, b = _operands("add", layout, images=True, a=a, b=b)
    return torch.add(a, b)


def mul(a: Tensor, b: Tensor, *, layout: str = "copy") -> Tensor:
    """Products of elements; sizes as torch broadcasts them."""
    a, b = _operands("mul", layout, images=True, a=a, b=b)
    return torch.mul(a, b)


def gelu(x: Tensor, *, approximate: str = "none", layout: str = "copy") -> Tensor:
    """x times the probability that a normal variable is below x; "tanh" is GPT-2's curve."""
    if approximate not in ("none", "tanh"):
        raise unknown("approximation", approximate, ("none", "tanh"), "approximate= of gelu")
    (x,) = _operands("gelu", layout, images=True, x=x)
    return functional.gelu(x, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor, *, layout: str = "copy") -> Tensor:
    """silu(gate) * up, of equal sizes. The first argument is the one that is activated."""
    gate, up = _operands("swiglu", layout, gate=gate, up=up)
    _demand(gate.shape == up.shape, "swiglu", "the sizes of gate and up differ", gate=gate, up=up)
    return functional.silu(gate) * up


# --- over the last dimension ----------------------------------------------------------------------


def softmax_lastdim(x: Tensor, *, layout: str = "copy") -> Tensor:
    """exp(x) over its sum, along the last dimension. A row of -inf has no softmax: it is NaN."""
    (x,) = _operands("softmax_lastdim", layout, x=x)
    _demand(x.dim() >= 1, "softmax_lastdim", "x has no dimension", x=x)
    return torch.softmax(x, -1)


def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    layout: str = "copy",
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; the variance is over n, not n - 1."""
    x, weight, bias = _operands("layernorm", layout, x=x, weight=weight, bias=bias)
    _demand(x.dim() >= 1, "layernorm", "x has no dimension", x=x)
    _fits_last("layernorm", x.shape[-1], weight=weight, bias=bias)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, layout: str = "copy"
) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight."""
    x, weight = _operands("rms_norm", layout, x=x, weight=weight)
    _demand(x.dim() >= 1, "rms_norm", "x has no dimension", x=x)
    _fits_last("rms_norm", x.shape[-1], weight=weight)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


# --- attention ------------------------------------------------------------------------------------


def self_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "copy",
) -> Tensor:
    """softmax(scale * query @ key^T + mask) @ value for each head.

    All three are (batch, heads, tokens, size). Query may have a multiple of the heads of key and
    value, which neighbours then share. `mask` broadcasts to (batch, heads, queries, keys): bool
    says where to look, a floating one is added. `causal`: query i looks at keys 0 to i. A query
    that may look nowhere gives zeros. `scale` is 1 / sqrt(size) unless given.
    """
    op = "self_attention"
    query, key, value = _operands(op, layout, query=query, key=key, value=value)
    _ranks(op, 4, query=query, key=key, value=value)
    heads, shared = query.shape[1], key.shape[1]
    _demand(
        key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3] and heads % max(shared, 1) == 0,
        op, "batch, tokens, head size or number of heads do not fit",
        query=query, key=key, value=value,
    )  # fmt: skip
    mask = _mask(mask, query, key, causal, layout)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        0.0,
        causal and mask is None,
        scale=scale,
        enable_gqa=heads != shared,
    )


def _mask(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, layout: str
) -> Tensor | None:
    """The mask with the triangle in it: torch wants one or the other."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = _operands("self_attention", layout, query=query, mask=mask)[1]
    else:
        mask = laid_out(mask, "self_attention", "mask", layout)
    if not causal:
        return mask
    sizes = (query.shape[2], key.shape[2])
    seen = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "copy"
) -> tuple[Tensor, Tensor]:
    """Query and key (batch, heads, tokens, size) turned by angles (tokens, size), half with half.

    The pairs are (i, i + size / 2), as in Llama; cos and sin hold each angle in both halves.
    """
    query, key, cos, sin = _operands("rope", layout, query=query, key=key, cos=cos, sin=sin)
    _ranks("rope", 4, query=query, key=key)
    _demand(
        cos.shape == sin.shape == query.shape[2:] == key.shape[2:] and cos.shape[1] % 2 == 0,
        "rope", "cos and sin must be (tokens, size), with an even size",
        query=query, key=key, cos=cos, sin=sin,
    )  # fmt: skip
    return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


# --- tables and losses ----------------------------------------------------------------------------


def embedding(tokens: Tensor, weight: Tensor, *, layout: str = "copy") -> Tensor:
    """The rows of weight that tokens, whole numbers, name."""
    (weight,) = _operands("embedding", layout, weight=weight)
    _ranks("embedding", 2, weight=weight)
    _whole("embedding", tokens=tokens)
    return functional.embedding(laid_out(tokens, "embedding", "tokens", layout), weight)


def cross_entropy(logits: Tensor, labels: Tensor, *, layout: str = "copy") -> Tensor:
    """The mean over rows of -log(softmax(logits)[label]); a label of -100 leaves its row out."""
    (logits,) = _operands("cross_entropy", layout, logits=logits)
    _ranks("cross_entropy", 2, logits=logits)
    _whole("cross_entropy", labels=labels)
    _demand(
        labels.shape == logits.shape[:1],
        "cross_entropy", "there must be one label for each row", logits=logits, labels=labels,
    )  # fmt: skip
    return functional.cross_entropy(logits, laid_out(labels, "cross_entropy", "labels", layout))


# --- the contract ---------------------------------------------------------------------------------


def _operands(
    op: str, layout: str, images: bool = False, **tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """The arguments, of one floating dtype on one device, laid out; None stays None."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise OperandError(f"{op}: {name} is of type {type(tensor).__name__}, not a tensor.")
        if not tensor.is_floating_point():
            raise OperandError(f"{op}: {name} is {tensor.dtype}; give a floating dtype.")
    first = next(iter(given.values()))
    for what in ("dtype", "device"):
        if any(getattr(tensor, what) != getattr(first, what) for tensor in given.values()):
            listed = ", ".join(f"{name} {getattr(one, what)}" for name, one in given.items())
            raise OperandError(f"{op}: the arguments have different {what}s: {listed}.")
    laid = {name: laid_out(one, op, name, layout, images) for name, one in given.items()}
    return tuple(laid.get(name) for name in tensors)  # type: ignore[misc]


def _whole(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise OperandError(f"{op}: {name} is {tensor.dtype}; give int64 or int32.")


def _ranks(op: str, rank: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _demand(tensor.dim() == rank, op, f"{name} must have {rank} dimensions", **{name: tensor})


def _fits_last(op: str, size: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            holds = tensor.dim() == 1 and tensor.shape[0] == size
            _demand(holds, op, f"{name} must have as many elements as a row", **{name: tensor})


def _demand(holds: bool, op: str, message: str, **tensors: Tensor) -> None:
    if not holds:
        listed = ", ".join(f"{name} {list(one.shape)}" for name, one in tensors.items())
        raise OperandError(f"{op}: {message}: {listed}.")


BY_NAME: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    op.__name__: op
    for op in (
        matmul2d, linear, conv2d, add, mul, gelu, swiglu, softmax_lastdim, layernorm, rms_norm,
        self_attention, rope, embedding, cross_entropy,
    )
}  # fmt: skip
