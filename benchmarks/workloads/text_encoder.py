"""A text encoder with the layout of BERT-base: post-norm, learned positions, a pooled output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.workloads.attention import Attention
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 30522
    width: int = 768
    heads: int = 12
    layers: int = 12
    tokens: int = 128
    batch: int = 1


BASE = Sizes()
SMALL = Sizes(vocabulary=64, width=32, heads=4, layers=2, tokens=12)


# Of what is added to the residual. With 1 a post-norm stack of random layers averages its tokens,
# layer by layer, until all are the same.
BRANCH_GAIN = 0.5


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.mlp_norm = nn.LayerNorm(width)
        self.attention.output.gain = self.mlp[-1].gain = BRANCH_GAIN

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.mlp_norm(x + self.mlp(x))


class TextEncoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.pooler = nn.Linear(sizes.width, sizes.width)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = real[:, None, None, :]
        x = self.norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


def text_encoder(small: bool = False) -> Case:
    return _case(SMALL if small else BASE)


def text_encoder_b8(small: bool = False) -> Case:
    return _case(replace(SMALL, batch=2) if small else replace(BASE, batch=8))


def _case(sizes: Sizes) -> Case:
    model = draw(TextEncoder(sizes))
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens))
    # The first text fills its row, the others are padded.
    lengths = torch.randint(sizes.tokens // 2, sizes.tokens, (sizes.batch, 1))
    lengths[0] = sizes.tokens
    return Case(model, (tokens, torch.arange(sizes.tokens) < lengths))


WORKLOADS = (
    Workload(
        "text-encoder",
        text_encoder,
        "BERT-base: width 768, 12 layers, 12 heads, 128 tokens",
    ),
    Workload(
        "text-encoder-b8",
        text_encoder_b8,
        "BERT-base: width 768, 12 layers, 12 heads, 8 padded texts of 128 tokens",
    ),
)
