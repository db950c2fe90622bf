"""Torch's inference fast paths, which are one opaque operator each, as what they compute.

`nn.TransformerEncoderLayer` calls one in eval mode without gradients. It goes through torch's BLAS
op by op; taken apart, its linear layers and its attention are regions like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten
Optional = torch.Tensor | None


def rules() -> dict[Any, Callable[..., Any]]:
    """Decompositions for AOTAutograd; what they decline stays the operator that it is."""
    return {aten._transformer_encoder_layer_fwd.default: _encoder_layer}


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: Optional = None,
    mask_type: int | None = None,
) -> Any:
    if mask is not None or src.dim() != 3:  # masks have conventions of their own there
        return NotImplemented

    def first_norm(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second_norm(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attended(x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        joint = functional.linear(x, qkv_weight, qkv_bias)
        heads = joint.view(batch, length, 3, num_heads, embed_dim // num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(query, key, value)
        out = out.transpose(1, 2).reshape(batch, length, embed_dim)
        return functional.linear(out, proj_weight, proj_bias)

    def expanded(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attended(first_norm(src))
        return x + expanded(second_norm(x))
    x = first_norm(src + attended(src))
    return second_norm(x + expanded(x))
