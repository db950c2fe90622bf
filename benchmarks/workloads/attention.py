"""Multi-head attention, in the two forms that the models here share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Query, key and value by a product each; over `x` itself or over a context."""

    def __init__(
        self,
        width: int,
        heads: int,
        context_width: int | None = None,
        bias: bool = True,
        output_bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        context_width = context_width or width
        self.heads, self.scale = heads, scale
        self.query = nn.Linear(width, width, bias=bias)
        # A softmax does not see a bias of the keys: its gradient would be rounding noise.
        self.key = nn.Linear(context_width, width, bias=False)
        self.value = nn.Linear(context_width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=output_bias)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = x if context is None else context
        mixed = scaled_dot_product_attention(
            split_heads(self.query(x), self.heads),
            split_heads(self.key(context), self.heads),
            split_heads(self.value(context), self.heads),
            attn_mask=mask,
            scale=self.scale,
        )
        return self.output(merge_heads(mixed))


class PackedAttention(nn.Module):
    """Query, key and value by one product, over `x` itself."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.packed = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (split_heads(part, self.heads) for part in self.packed(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(merge_heads(mixed))
