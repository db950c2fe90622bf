"""An image classifier with the layout of MobileNetV2: inverted residuals, depthwise kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Stage:
    expansion: int
    width: int
    blocks: int
    stride: int


@dataclass(frozen=True)
class Sizes:
    stages: tuple[Stage, ...]
    image: int = 224
    stem: int = 32
    last: int = 1280
    classes: int = 1000


MOBILENET_V2 = Sizes(
    (
        Stage(1, 16, 1, 1),
        Stage(6, 24, 2, 2),
        Stage(6, 32, 3, 2),
        Stage(6, 64, 4, 2),
        Stage(6, 96, 3, 1),
        Stage(6, 160, 3, 2),
        Stage(6, 320, 1, 1),
    )
)
SMALL = Sizes((Stage(1, 8, 1, 1), Stage(4, 16, 2, 2)), image=32, stem=8, last=32, classes=10)
BRANCH_GAIN = 0.7  # keeps the sum over the blocks within bounds


def convolution(
    inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inside * expansion
        self.adds = stride == 1 and inside == outside
        project = nn.Conv2d(width, outside, 1, bias=False)
        project.gain = BRANCH_GAIN if self.adds else 1.0
        norm = nn.BatchNorm2d(outside)
        # In training the next batch norm takes every shift out again: rounding noise for gradient.
        norm.bias.requires_grad_(False)
        self.branch = nn.Sequential(
            convolution(inside, width, 1) if expansion != 1 else nn.Identity(),
            convolution(width, width, 3, stride, groups=width),
            project,
            norm,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x) if self.adds else self.branch(x)


class MobileNet(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        blocks, inside = [convolution(3, sizes.stem, 3, 2)], sizes.stem
        for stage in sizes.stages:
            for block in range(stage.blocks):
                stride = 1 if block else stage.stride
                blocks.append(InvertedResidual(inside, stage.width, stride, stage.expansion))
                inside = stage.width
        self.blocks = nn.Sequential(*blocks, convolution(inside, sizes.last, 1))
        self.head = nn.Linear(sizes.last, sizes.classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(image).mean((2, 3)))


def mobile_cnn(small: bool = False) -> Case:
    sizes = SMALL if small else MOBILENET_V2
    return Case(draw(MobileNet(sizes), RELU_GAIN), (random_picture(sizes.image),))


WORKLOADS = (
    Workload(
        "mobile-cnn",
        mobile_cnn,
        "MobileNetV2: 17 inverted residuals, image of 224x224, 1000 classes",
    ),
)
