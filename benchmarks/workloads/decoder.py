"""A decoder with the layout of GPT-2: pre-norm, learned positions, the head tied to the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from benchmarks.workloads.attention import PackedAttention
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 50257
    width: int = 768
    heads: int = 12
    layers: int = 12
    tokens: int = 256


BASE = Sizes()
SMALL = Sizes(vocabulary=64, width=32, heads=4, layers=2, tokens=12)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = PackedAttention(width, heads, causal=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the token that comes next: a prefill needs no others."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return linear(self.norm(self.layers(x)[:, -1:]), self.tokens.weight)


def decoder_prefill(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    model = draw(Decoder(sizes))
    return Case(model, (torch.randint(sizes.vocabulary, (1, sizes.tokens)),))


WORKLOADS = (
    Workload(
        "decoder-prefill",
        decoder_prefill,
        "GPT-2: width 768, 12 layers, 12 heads, prompt of 256 tokens",
    ),
)
