"""An image classifier with the layout of ConvNeXt-tiny: large depthwise kernels and layer norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    image: int = 224
    widths: tuple[int, ...] = (96, 192, 384, 768)
    blocks: tuple[int, ...] = (3, 3, 9, 3)
    classes: int = 1000


TINY = Sizes()
SMALL = Sizes(image=32, widths=(16, 32), blocks=(1, 2), classes=10)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of a picture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.empty(width))

    def draw_own(self) -> None:
        self.scale.uniform_(0.2, 0.6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.mlp(self.norm(self.spatial(x).permute(0, 2, 3, 1)))
        return x + (self.scale * branch).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        first, last = sizes.widths[0], sizes.widths[-1]
        layers: list[nn.Module] = [nn.Conv2d(3, first, 4, stride=4), ChannelNorm(first, eps=1e-6)]
        inside = first
        for width, count in zip(sizes.widths, sizes.blocks, strict=True):
            if width != inside:
                layers += [ChannelNorm(inside, eps=1e-6), nn.Conv2d(inside, width, 2, stride=2)]
            layers += [Block(width) for _ in range(count)]
            inside = width
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(last, eps=1e-6)
        self.head = nn.Linear(last, sizes.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(image).mean((2, 3))))


def modern_cnn(small: bool = False) -> Case:
    sizes = SMALL if small else TINY
    return Case(draw(ConvNeXt(sizes)), (random_picture(sizes.image),))


WORKLOADS = (
    Workload(
        "modern-cnn",
        modern_cnn,
        "ConvNeXt-tiny: widths 96 to 768, blocks of 3, 3, 9, 3, image of 224x224",
    ),
)
