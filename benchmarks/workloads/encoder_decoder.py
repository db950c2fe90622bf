"""An encoder and a decoder with the layout of T5-small: relative positions, RMSNorm, no biases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from benchmarks.workloads.attention import Attention
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 32128
    width: int = 512
    hidden: int = 2048
    heads: int = 8
    layers: int = 6  # on either side
    source: int = 128
    target: int = 32


T5_SMALL = Sizes()
SMALL = Sizes(vocabulary=64, width=32, hidden=64, heads=4, layers=2, source=12, target=6)


class RelativePositions(nn.Module):
    """What every head adds to its scores by distance: near ones exactly, far ones in log steps."""

    def __init__(self, heads: int, both_ways: bool, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.both_ways, self.buckets, self.farthest = both_ways, buckets, farthest
        self.table = nn.Embedding(buckets, heads)

    def forward(self, length: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(length, device=device)
        distance = positions[None, :] - positions[:, None]
        bias = self.table(self._bucket(distance)).permute(2, 0, 1)[None]
        return bias if self.both_ways else bias.masked_fill(distance > 0, -math.inf)

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        count, first = self.buckets, 0
        if self.both_ways:
            count //= 2
            first = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        steps = torch.log(distance.clamp(min=1) / exact) / math.log(self.farthest / exact)
        far = (exact + (steps * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, far)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, decodes: bool) -> None:
        super().__init__()
        width = sizes.width
        self.self_norm = nn.RMSNorm(width, eps=1e-6)
        self.self_attention = _attention(sizes)
        self.decodes = decodes
        if decodes:
            self.cross_norm = nn.RMSNorm(width, eps=1e-6)
            self.cross_attention = _attention(sizes)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, sizes.hidden, bias=False),
            nn.ReLU(),
            nn.Linear(sizes.hidden, width, bias=False),
        )

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.self_attention(self.self_norm(x), mask=bias)
        if self.decodes:
            x = x + self.cross_attention(self.cross_norm(x), source)
        return x + self.mlp(self.mlp_norm(x))


def _attention(sizes: Sizes) -> Attention:
    """Its scores are not scaled: the weights of the query are, when they are drawn."""
    attention = Attention(sizes.width, sizes.heads, bias=False, output_bias=False, scale=1.0)
    attention.query.gain = (sizes.width // sizes.heads) ** -0.5
    return attention


class Stack(nn.Module):
    def __init__(self, sizes: Sizes, decodes: bool) -> None:
        super().__init__()
        self.positions = RelativePositions(sizes.heads, both_ways=not decodes)
        self.layers = nn.ModuleList(Layer(sizes, decodes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        bias = self.positions(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias, source)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.encoder = Stack(sizes, decodes=False)
        self.decoder = Stack(sizes, decodes=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.tokens(source))
        return linear(self.decoder(self.tokens(target), encoded), self.tokens.weight)


def encoder_decoder(small: bool = False) -> Case:
    sizes = SMALL if small else T5_SMALL
    model = draw(EncoderDecoder(sizes))
    source = torch.randint(sizes.vocabulary, (1, sizes.source))
    return Case(model, (source, torch.randint(sizes.vocabulary, (1, sizes.target))))


WORKLOADS = (
    Workload(
        "encoder-decoder",
        encoder_decoder,
        "T5-small: width 512, 6 + 6 layers, 8 heads, 128 tokens in, logits of 32 tokens out",
    ),
)
