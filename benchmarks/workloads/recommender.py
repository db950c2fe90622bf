"""A click predictor with the layout of DLRM: bags of categories, products of all pairs, MLPs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    numbers: int = 13
    tables: int = 26
    rows: int = 10000
    width: int = 64
    bag: int = 4
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)
    batch: int = 128


BASE = Sizes()
SMALL = Sizes(4, 3, rows=20, width=8, bag=2, bottom=(16,), top=(16,), batch=6)


def mlp(inside: int, hidden: tuple[int, ...], outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inside, width), nn.ReLU()]
        inside = width
    return nn.Sequential(*layers, nn.Linear(inside, outside))


class Interactions(nn.Module):
    """The products of all pairs of features, each pair once."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(features, features, offset=-1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(features, features.transpose(1, 2))
        return products[:, self.pairs[0], self.pairs[1]]


class Recommender(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        features = sizes.tables + 1
        self.bottom = mlp(sizes.numbers, sizes.bottom, sizes.width)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(sizes.rows, sizes.width, mode="sum") for _ in range(sizes.tables)
        )
        self.interactions = Interactions(features)
        self.top = mlp(sizes.width + features * (features - 1) // 2, sizes.top, 1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """`categories` has one row of bags per table; the answer is a probability."""
        dense = self.bottom(numbers)
        bags = [table(rows) for table, rows in zip(self.tables, categories, strict=True)]
        pairs = self.interactions(torch.stack([dense, *bags], dim=1))
        return torch.sigmoid(self.top(torch.cat((dense, pairs), dim=1)))


def recommender(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    model = draw(Recommender(sizes), RELU_GAIN)
    categories = torch.randint(sizes.rows, (sizes.tables, sizes.batch, sizes.bag))
    return Case(model, (torch.randn(sizes.batch, sizes.numbers), categories))


WORKLOADS = (
    Workload(
        "recommender",
        recommender,
        "DLRM: 26 tables of 10000x64, bags of 4, 13 numbers, MLPs of 512 and 256, batch of 128",
    ),
)
