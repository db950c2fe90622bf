"""An image classifier with the layout of ViT-base: patches, a class token, pre-norm layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads.attention import PackedAttention
from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    image: int = 224
    patch: int = 16
    width: int = 768
    heads: int = 12
    layers: int = 12
    classes: int = 1000


BASE = Sizes()
SMALL = Sizes(image=32, patch=8, width=32, heads=4, layers=2, classes=10)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attention = PackedAttention(width, heads, causal=False)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Patches(nn.Module):
    """The image cut into patches, a class token before them, and where each one is."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        count = (sizes.image // sizes.patch) ** 2
        self.cut = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, sizes.width))
        self.positions = nn.Parameter(torch.empty(1, count + 1, sizes.width))

    def draw_own(self) -> None:
        self.class_token.normal_()
        self.positions.normal_(std=0.2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        patches = self.cut(image).flatten(2).transpose(1, 2)
        first = self.class_token.expand(image.shape[0], -1, -1)
        return torch.cat((first, patches), dim=1) + self.positions


class VisionTransformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = Patches(sizes)
        self.layers = nn.Sequential(*(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width, eps=1e-6)
        self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.patches(image)))[:, 0])


def vision_transformer(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    return Case(draw(VisionTransformer(sizes)), (random_picture(sizes.image),))


WORKLOADS = (
    Workload(
        "vision-transformer",
        vision_transformer,
        "ViT-base: width 768, 12 layers, 12 heads, image of 224x224 in patches of 16",
    ),
)
