"""An image classifier with the layout of ResNet-50: bottleneck blocks with batch norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import relu

from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    image: int = 224
    stem: int = 64
    widths: tuple[int, ...] = (64, 128, 256, 512)  # inside the blocks; outside four times as wide
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000


RESNET_50 = Sizes()
BRANCH_GAIN = 0.5  # so that a sum over many blocks does not grow without bound
SMALL = Sizes(image=64, stem=8, widths=(8, 16), blocks=(2, 1), classes=10)


def convolution(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outside),
    )


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.reduce = convolution(inside, width, 1)
        self.spatial = convolution(width, width, 3, stride)
        self.expand = convolution(width, outside, 1)
        self.expand[0].gain = BRANCH_GAIN
        self.shortcut: nn.Module = nn.Identity()
        if inside != outside or stride != 1:
            self.shortcut = convolution(inside, outside, 1, stride)
            self.shortcut[0].gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = relu(self.spatial(relu(self.reduce(x))))
        return relu(self.expand(branch) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, sizes.stem, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks, inside = [], sizes.stem
        for stage, (width, count) in enumerate(zip(sizes.widths, sizes.blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inside, width, stride))
                inside = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, sizes.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


def cnn(small: bool = False) -> Case:
    sizes = SMALL if small else RESNET_50
    return Case(draw(ResNet(sizes), RELU_GAIN), (random_picture(sizes.image),))


WORKLOADS = (
    Workload("cnn", cnn, "ResNet-50: blocks of 3, 4, 6, 3, image of 224x224, 1000 classes"),
)
