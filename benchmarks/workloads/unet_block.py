"""One level of a diffusion UNet: residual blocks that know the time, self and cross attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from benchmarks.workloads.attention import Attention
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    channels: int = 320
    side: int = 32
    heads: int = 8
    groups: int = 32
    blocks: int = 2
    context_tokens: int = 77
    context_width: int = 768


BASE = Sizes()
SMALL = Sizes(channels=32, side=8, heads=4, groups=4, context_tokens=6, context_width=24)


class Time(nn.Module):
    """A step of the diffusion as sines and cosines, then through two products."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, 4 * channels)
        )

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * self.frequencies
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))


class Residual(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(groups, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(4 * channels, channels)
        self.second_norm = nn.GroupNorm(groups, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        branch = self.first(silu(self.first_norm(x)))
        branch = branch + self.time(silu(time))[:, :, None, None]
        return x + self.second(silu(self.second_norm(branch)))


class GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * gelu(gate))


class SpatialTransformer(nn.Module):
    """Every pixel attends to all pixels, then to the context, which is a text."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, heads = sizes.channels, sizes.heads
        self.norm = nn.GroupNorm(sizes.groups, width, eps=1e-6)
        self.enter = nn.Conv2d(width, width, 1)
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, bias=False)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, sizes.context_width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = GatedMlp(width)
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, picture: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = self.enter(self.norm(picture)).flatten(2).transpose(1, 2)
        x = x + self.self_attention(self.self_norm(x))
        x = x + self.cross_attention(self.cross_norm(x), context)
        x = x + self.mlp(self.mlp_norm(x))
        return picture + self.leave(x.transpose(1, 2).unflatten(2, picture.shape[2:]))


class UNetBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.time = Time(sizes.channels)
        self.residuals = nn.ModuleList(
            Residual(sizes.channels, sizes.groups) for _ in range(sizes.blocks)
        )
        self.transformers = nn.ModuleList(SpatialTransformer(sizes) for _ in range(sizes.blocks))
        self.shrink = nn.Conv2d(sizes.channels, sizes.channels, 3, stride=2, padding=1)

    def forward(
        self, picture: torch.Tensor, step: torch.Tensor, context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time = self.time(step)
        for residual, transformer in zip(self.residuals, self.transformers, strict=True):
            picture = transformer(residual(picture, time), context)
        return picture, self.shrink(picture)


def unet_block(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    picture = torch.randn(1, sizes.channels, sizes.side, sizes.side)
    context = torch.randn(1, sizes.context_tokens, sizes.context_width)
    return Case(draw(UNetBlock(sizes)), (picture, torch.randint(1000, (1,)), context))


WORKLOADS = (
    Workload(
        "unet-block",
        unet_block,
        "first level of Stable Diffusion's UNet: 320 channels of 32x32, 8 heads, 77 text tokens",
    ),
)
