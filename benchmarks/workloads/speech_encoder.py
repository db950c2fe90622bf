"""A speech encoder with the layout of Whisper's: two convolutions, then pre-norm layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu

from benchmarks.workloads.attention import Attention
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    bands: int = 80
    positions: int = 1500  # of half as many spectra
    width: int = 384
    heads: int = 6
    layers: int = 4


TINY = Sizes()
SMALL = Sizes(bands=8, positions=12, width=32, heads=4, layers=2)


def sinusoids(positions: int, width: int) -> torch.Tensor:
    steps = torch.arange(width // 2) / (width // 2 - 1)
    angles = torch.outer(torch.arange(positions).float(), torch.exp(-math.log(10000.0) * steps))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class SpeechEncoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first = nn.Conv1d(sizes.bands, sizes.width, 3, padding=1)
        self.second = nn.Conv1d(sizes.width, sizes.width, 3, stride=2, padding=1)
        self.register_buffer("positions", sinusoids(sizes.positions, sizes.width))
        self.layers = nn.Sequential(*(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        x = gelu(self.second(gelu(self.first(spectra)))).transpose(1, 2)
        return self.norm(self.layers(x + self.positions))


def speech_encoder(small: bool = False) -> Case:
    sizes = SMALL if small else TINY
    spectra = torch.randn(1, sizes.bands, 2 * sizes.positions)
    return Case(draw(SpeechEncoder(sizes)), (spectra,))


WORKLOADS = (
    Workload(
        "speech-encoder",
        speech_encoder,
        "Whisper-tiny's encoder: width 384, 4 layers, 6 heads, 3000 spectra to 1500 positions",
    ),
)
