"""Rows or channels last: what Inductor is told of a training graph's images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import image_layouts

pytestmark = pytest.mark.quick

# A layer, its input, and whether images lie channels last in training.
CASES: dict[str, tuple[nn.Module, tuple[int, ...], bool | None]] = {
    "large images": (nn.Conv2d(8, 8, 3), (1, 8, 40, 40), True),
    "small images": (nn.Conv2d(8, 8, 3), (1, 8, 10, 10), False),
    "as many images as make up for it": (nn.Conv2d(8, 8, 3), (9, 8, 10, 10), True),
    "1x1": (nn.Conv2d(64, 64, 1), (1, 64, 3, 3), True),
    "depthwise": (nn.Conv2d(64, 64, 5, groups=64), (1, 64, 6, 6), True),
    "patches": (nn.Conv2d(3, 64, 16, stride=16), (1, 3, 64, 64), False),
    "lines": (nn.Conv1d(8, 8, 3), (1, 8, 4000), False),
    "volumes": (nn.Conv3d(8, 8, 1), (1, 8, 9, 9, 9), False),
    "no convolution": (nn.Linear(8, 8), (4, 8), None),
}


def graph_of(layer: nn.Module, x: Tensor, tracing: str = "fake") -> Any:
    traced = make_fx(lambda x: layer(x), tracing_mode=tracing, _allow_non_fake_inputs=True)(x)
    return traced.graph


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    layer, sizes, wanted = CASES[name]
    told = image_layouts.config_for(graph_of(layer, torch.randn(sizes)), training=True)
    assert told == ({} if wanted is None else {"layout_optimization": wanted})


def test_sizes_that_change_count_as_they_were_traced() -> None:
    graph = graph_of(nn.Conv2d(8, 8, 3), torch.randn(2, 8, 40, 40), "symbolic")
    assert image_layouts.config_for(graph, training=True) == {"layout_optimization": True}


def test_in_inference_inductor_decides_between_layers() -> None:
    layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    assert image_layouts.config_for(graph_of(layers, torch.randn(1, 8, 9, 9)), training=False) == {}
    alone = graph_of(nn.Conv2d(8, 8, 1), torch.randn(1, 8, 9, 9))
    assert image_layouts.config_for(alone, training=False) == {"layout_optimization": False}
