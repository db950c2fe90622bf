"""The oracle of `lowering.ops`: the same operations again, from sums, products and exponentials.

Nothing here calls a library's product, softmax, norm or attention, so that no library can be wrong
in the same way on both sides. Written to be read and to be run in float64, not to be fast. Every
target, the CPU too, is compared with this; arguments are those of `lowering.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Sizes = int | tuple[int, int]


def matmul2d(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None] * b[None, :, :]).sum(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    sums = (x[..., None, :] * weight).sum(-1)
    return sums if bias is None else sums + bias


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """One sum over channels for each place of the kernel."""
    (down, right), (rows, columns), (down_by, right_by) = map(_pair, (stride, padding, dilation))
    batch, channels, height, width = x.shape
    out, _, high, wide = weight.shape
    padded = x.new_zeros(batch, channels, height + 2 * rows, width + 2 * columns)
    padded[:, :, rows : rows + height, columns : columns + width] = x
    tall = (padded.shape[2] - down_by * (high - 1) - 1) // down + 1
    broad = (padded.shape[3] - right_by * (wide - 1) - 1) // right + 1
    total = x.new_zeros(batch, out, tall, broad)
    for i in range(high):
        for j in range(wide):
            top, left = i * down_by, j * right_by
            seen = padded[:, :, top : top + down * tall : down, left : left + right * broad : right]
            parts = seen.unflatten(1, (groups, 1, channels // groups))
            kernels = weight[:, :, i, j].reshape(groups, out // groups, channels // groups, 1, 1)
            total = total + (parts * kernels).sum(3).flatten(1, 2)
    return total if bias is None else total + bias[:, None, None]


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def softmax_lastdim(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return powers / powers.sum(-1, keepdim=True)


def layernorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
    normed = centred / torch.sqrt(variance + eps)
    scaled = normed if weight is None else normed * weight
    return scaled if bias is None else scaled + bias


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    normed = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return normed if weight is None else normed * weight


def self_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scores, their softmax over the keys that may be seen, and the mean of values it gives."""
    shared_by = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query[:, :, :, None, :] * key[:, :, None, :, :]).sum(-1) * factor
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask
    if causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[2:])
        hidden = hidden | (columns[None, :] > rows[:, None])
    weights = _softmax_of_seen(scores.masked_fill(hidden, -math.inf))
    return (weights[..., None] * value[:, :, None, :, :]).sum(-2)


def _softmax_of_seen(scores: Tensor) -> Tensor:
    """A row without any number gives zeros."""
    highest = scores.amax(-1, keepdim=True).detach()
    powers = torch.exp(scores - torch.where(highest == -math.inf, 0.0, highest))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair (first half, second half) is a point in the plane that is turned by its angle."""

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        left = first * cos[:, :half] - second * sin[:, :half]
        right = second * cos[:, half:] + first * sin[:, half:]
        return torch.stack((left, right), -2).flatten(-2)

    return turned(query), turned(key)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    rows = torch.arange(weight.shape[0], device=weight.device)
    chosen = (tokens[..., None] == rows).to(weight.dtype)
    return (chosen[..., None] * weight).sum(-2)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    counted = labels != -100
    columns = torch.arange(logits.shape[1], device=logits.device)
    of_label = torch.where(columns == labels[:, None], logits, 0.0).sum(-1)
    highest = logits.amax(-1, keepdim=True).detach()
    log_sums = torch.log(torch.exp(logits - highest).sum(-1)) + highest[:, 0]
    return torch.where(counted, log_sums - of_label, 0.0).sum() / counted.sum()


def _pair(sizes: Sizes) -> tuple[int, int]:
    return (sizes, sizes) if isinstance(sizes, int) else sizes


BY_NAME: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    op.__name__: op
    for op in (
        matmul2d, linear, conv2d, add, mul, gelu, swiglu, softmax_lastdim, layernorm, rms_norm,
        self_attention, rope, embedding, cross_entropy,
    )
}  # fmt: skip
