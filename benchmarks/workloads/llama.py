"""A decoder with the layout of Llama: RMSNorm, rotary positions, SwiGLU, grouped queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.workloads.attention import merge_heads, split_heads
from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.rotary import RotaryTable, rotate
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 32000
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    key_heads: int = 4
    layers: int = 12
    tokens: int = 256
    cache: int = 512
    position: int = 300  # of the token that is decoded; the cache is filled up to here

    @property
    def head_width(self) -> int:
        return self.width // self.heads


BASE = Sizes()
SMALL = Sizes(64, 32, 64, heads=4, key_heads=2, layers=2, tokens=12, cache=16, position=9)


class GroupedAttention(nn.Module):
    """Several query heads share a key head. With a position it decodes one token with the cache."""

    def __init__(self, width: int, heads: int, key_heads: int, cache: int = 0) -> None:
        super().__init__()
        head_width = width // heads
        self.heads, self.key_heads = heads, key_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * head_width, bias=False)
        self.value = nn.Linear(width, key_heads * head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        if cache:
            self.register_buffer("keys", torch.randn(1, key_heads, cache, head_width))
            self.register_buffer("values", torch.randn(1, key_heads, cache, head_width))

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        position: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = rotate(split_heads(self.query(x), self.heads), rotation)
        key = rotate(split_heads(self.key(x), self.key_heads), rotation)
        value = split_heads(self.value(x), self.key_heads)
        if position is None:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            mixed = self._decode(query, key, value, position)
        return self.output(merge_heads(mixed))

    def _decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """The cache is written in place; calling again writes the same."""
        keys = self.keys.index_copy_(2, position, key)
        values = self.values.index_copy_(2, position, value)
        seen = torch.arange(keys.shape[2], device=query.device) <= position
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=seen[None, None, None, :], enable_gqa=True
        )


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, cache: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = GroupedAttention(sizes.width, sizes.heads, sizes.key_heads, cache)
        self.mlp_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.mlp = SwiGLU(sizes.width, sizes.hidden)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        position: torch.Tensor | None,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, position)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Without a position the tokens are a prompt; with one, a single token to decode."""

    def __init__(self, sizes: Sizes, cache: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.rotary = RotaryTable(cache or sizes.tokens, sizes.head_width)
        self.layers = nn.ModuleList(Layer(sizes, cache) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of the token that comes next."""
        x = self.tokens(tokens)
        everywhere = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = self.rotary(everywhere if position is None else position)
        for layer in self.layers:
            x = layer(x, rotation, position)
        return self.head(self.norm(x[:, -1:]))


def llama_prefill(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    model = draw(Llama(sizes))
    return Case(model, (torch.randint(sizes.vocabulary, (1, sizes.tokens)),))


def llama_decode(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    # Gradients would flow into the cache, and from call to call.
    model = draw(Llama(sizes, sizes.cache)).requires_grad_(False)
    token = torch.randint(sizes.vocabulary, (1, 1))
    return Case(model, (token, torch.tensor([sizes.position])))


WORKLOADS = (
    Workload(
        "llama-prefill",
        llama_prefill,
        "Llama, 153M weights: width 768, 12 layers, 12 heads over 4, prompt of 256 tokens",
    ),
    Workload(
        "llama-decode",
        llama_decode,
        "the same Llama, 153M weights: one token, static cache of 512 positions, 300 filled",
        trains=False,
    ),
)
