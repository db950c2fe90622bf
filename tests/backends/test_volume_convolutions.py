"""3-D convolutions through oneDNN: numbers, where outputs lie, and the report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, used
from tests.support.regions import assert_regions, hold, no_cached_graphs
from tests.support.reports import graph_reports

LEVELS = ["O1", "O2"]
LAYERS = {
    "3x3x3": nn.Conv3d(6, 8, 3, padding=1),
    "uneven": nn.Conv3d(6, 5, (1, 3, 2), (1, 2, 3), (0, 1, 1), bias=False),
    "dilated": nn.Conv3d(6, 5, 3, padding=2, dilation=(1, 2, 1)),
    "grouped": nn.Conv3d(6, 9, 3, groups=3),
    "by channel": nn.Conv3d(6, 6, 3, padding=1, groups=6),
    "pointwise": nn.Conv3d(6, 16, 1),
    "patches": nn.Conv3d(6, 12, (2, 4, 4), (2, 4, 4)),
}
every_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_the_layer_alone(layer: nn.Module) -> None:
    compiled = compile_at("O1", layer)
    for batch in (2, 1):
        x = torch.randn(batch, 6, 6, 9, 11)
        hold(compiled, layer, x)
        hold(compiled, layer, x.contiguous(memory_format=torch.channels_last_3d))
    rows = {(row.name, row.provider) for graph in graph_reports(compiled) for row in graph.regions}
    assert rows == {("convolution", "mkldnn")}


@every_level
def test_what_follows_is_absorbed(level: str) -> None:
    x = torch.randn(2, 3, 5, 12, 10)
    layers = (
        nn.Conv3d(3, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 24, 3, padding=1, bias=False),
        nn.BatchNorm3d(24),
        nn.SiLU(),
    )
    model = used(nn.Sequential(*layers), x)
    with no_cached_graphs():
        compiled = compile_at(level, model)
        hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "mkldnn", 2, 2))
    (region,) = graph_reports(compiled)[0].regions
    assert region.recipes == ("fold-batch-norm", "prepack")
    assert region.detail == "with relu, silu"


@every_level
def test_sums_over_many_channels_are_as_exact_as_eagers(level: str) -> None:
    """Channels last, oneDNN's were off by twice what the contract allows."""
    layers = (nn.Conv3d(96, 128, 3, padding=1), nn.ReLU(), nn.Conv3d(128, 16, 3, stride=2))
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 96, 7, 12, 11)
    compiled = compile_at(level, model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "mkldnn", 2, 2))


@every_level
def test_weights_that_change_show(level: str) -> None:
    layer, x = nn.Conv3d(6, 8, 3).eval(), torch.randn(2, 6, 6, 9, 11)
    compiled = compile_at(level, layer)
    hold(compiled, layer, x)
    with torch.no_grad():
        layer.weight.mul_(1.5)
        layer.bias.add_(1)
    hold(compiled, layer, x)
    assert_regions(compiled, ("convolution", "mkldnn", 1, 2))


def test_sizes_that_change_and_no_volume_at_all() -> None:
    layer = nn.Conv3d(6, 8, 3, padding=1).eval()
    compiled = compile_at("O2", layer, dynamic=True)
    for batch, size in ((2, 7), (3, 12), (0, 5), (4, 9)):
        hold(compiled, layer, torch.randn(batch, 6, size, size + 1, size + 2))


@every_level
def test_a_volume_without_a_batch(level: str) -> None:
    layer = nn.Conv3d(6, 8, 3).eval()
    hold(compile_at(level, layer), layer, torch.randn(6, 6, 9, 11))


@every_level
def test_weights_that_are_computed_stay_torchs(level: str) -> None:
    model = Of(lambda self, x, w: functional.conv3d(x, w.tanh()))
    compiled = compile_at(level, model)
    hold(compiled, model, torch.randn(2, 6, 5, 5, 5), torch.randn(4, 6, 2, 2, 2))
    assert not [row for graph in graph_reports(compiled) for row in graph.regions]


@every_level
def test_reading_between_the_layers(level: str) -> None:
    """The norm and the slices in between see the volume as torch lays it."""
    norm = nn.GroupNorm(2, 8)
    layers = {"first": nn.Conv3d(6, 8, 3), "second": nn.Conv3d(8, 4, 2), "norm": norm}
    model = Of(lambda self, x: self.second(self.norm(self.first(x))[:, :, 1:].flip(3)), **layers)
    compiled = compile_at(level, model)
    hold(compiled, model, torch.randn(2, 6, 6, 9, 11))
