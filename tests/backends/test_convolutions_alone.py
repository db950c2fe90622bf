"""A convolution between images in rows: no way to channels last and back that gains nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kernel_dispatch import profiling
from lowering.regions import rows
from tests.support.compiling import compile_at
from tests.support.modules import Of, used
from tests.support.regions import (
    assert_regions,
    details,
    hold,
    no_cached_graphs,
    region_rows,
)
from tests.support.reports import assert_ran_as_planned, graph_reports

Tensor = torch.Tensor
BARE = {
    "3x3": nn.Conv2d(64, 64, 3, padding=1),
    "1x1": nn.Conv2d(64, 128, 1),
    "by channel": nn.Conv2d(128, 128, 7, padding=3, groups=128),
    "groups": nn.Conv2d(64, 64, 3, padding=1, groups=4),
}
every_layer = pytest.mark.parametrize("layer", BARE.values(), ids=BARE)


def image(layer: Any, batch: int = 2) -> Tensor:
    return torch.randn(batch, layer.in_channels, 40, 36)


def block(layer: Any) -> nn.Sequential:
    return used(nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()), image(layer))


def copies(compiled: Any, x: Tensor) -> int:
    with torch.no_grad(), torch.profiler.profile(activities=profiling.activities()) as profile:
        compiled(x)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


@every_layer
def test_alone_at_o1_it_is_torchs(layer: Any) -> None:
    x = image(layer)
    compiled = compile_at("O1", layer)
    hold(compiled, layer, x)
    assert not region_rows(compiled)


class Anchored(nn.Module):
    """Predictions for each of three anchors, as a detector's head makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(64, 3 * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out.view(out.shape[0], 3, 16, *out.shape[2:]).permute(0, 1, 3, 4, 2).sigmoid()


def test_a_head_of_a_detector_is_torchs_at_o1() -> None:
    model, x = Anchored().eval(), torch.randn(2, 64, 40, 36)
    compiled = compile_at("O1", model)
    hold(compiled, model, x)
    assert not region_rows(compiled)


@pytest.mark.parametrize(
    ("reads", "alone"),
    [
        (lambda x: x.flatten(1), True),
        (lambda x: x.view(2, 4, 2, 20, 18).sigmoid(), True),
        (lambda x: x.flatten(2), False),  # tokens: channels last is what they want
        (lambda x: x.permute(0, 2, 3, 1), False),
        (lambda x: nn.functional.max_pool2d(x, 2), False),
    ],
)
def test_who_reads_channels_as_they_lie_in_rows(reads: Any, alone: bool) -> None:
    weight = torch.randn(8, 3, 1, 1)
    module = make_fx(lambda x: reads(nn.functional.conv2d(x, weight).relu()))(
        torch.randn(2, 3, 20, 18)
    )
    (convolution,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default
    )
    assert rows.stands_alone(convolution, convolution.args[0]) is alone


def test_tokens_of_an_image_lie_channels_last() -> None:
    """Patches are taken to tokens without a copy there."""
    model = nn.Sequential(nn.Conv2d(64, 96, 3), nn.Flatten(2)).eval()
    x = torch.randn(2, 64, 40, 36)
    compiled = compile_at("O1", model)
    hold(compiled, model, x)
    assert_regions(compiled, ("convolution", "mkldnn", 1, 1))


@every_layer
def test_at_o1_onednn_works_in_rows_where_something_follows(layer: Any) -> None:
    x, model = image(layer), block(layer)
    with no_cached_graphs():
        compiled = compile_at("O1", model)
        hold(compiled, model, x)
    if layer.kernel_size == (1, 1):
        assert not [row for row in region_rows(compiled) if row[0] == "convolution"]
        return
    assert_regions(compiled, ("convolution", "mkldnn", 1, 1))
    assert details(compiled, "convolution") == ["with relu"]
    assert graph_reports(compiled)[0].regions[0].recipes == ("fold-batch-norm", "prepack")
    assert copies(compiled, x) == 0


@pytest.mark.parametrize("name", ["3x3", "1x1", "by channel"])
def test_at_o2_ours_writes_rows(name: str) -> None:
    layer = BARE[name]
    x = image(layer)
    for model in (layer, block(layer)):
        compiled = compile_at("O2", model)
        hold(compiled, model, x)
        hold(compiled, model, x.contiguous(memory_format=torch.channels_last))
        assert {row[:2] for row in region_rows(compiled)} == {("convolution", "openmp")}
        assert copies(compiled, x) == 0


def test_no_packing_is_reported_where_nothing_is_packed() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    with no_cached_graphs():
        compiled = compile_at("O1", nn.Sequential(layer, nn.GELU()).eval())
        hold(compiled, nn.Sequential(layer, nn.GELU()), image(layer))
    (region,) = graph_reports(compiled)[0].regions
    assert (region.name, region.provider, region.recipes) == ("convolution", "mkldnn", ())
    assert region.packed_bytes == 0


def test_volumes_are_onednns_alone_or_not() -> None:
    layer, x = nn.Conv3d(16, 32, 3, padding=1), torch.randn(1, 16, 12, 28, 28)
    compiled = compile_at("O1", layer)
    hold(compiled, layer, x)
    assert_regions(compiled, ("convolution", "mkldnn", 1, 1))
    assert copies(compiled, x) == 0


def test_who_is_chosen_by_name_takes_it() -> None:
    layer = BARE["1x1"]
    x = image(layer)
    for level in ("O1", "O2"):
        compiled = compile_at(level, layer, options={"provider": "mkldnn"})
        hold(compiled, layer, x)
        assert_regions(compiled, ("convolution", "mkldnn", 1, 1))


def test_weights_that_change_show_in_rows() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    model, x = block(layer), image(layer)
    compiled = compile_at("O1", model)
    hold(compiled, model, x)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
        model[1].bias.add_(1)
    hold(compiled, model, x, where="after the weights changed")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_between_convolutions_images_lie_channels_last(level: str) -> None:
    """The product alone would be torch's; behind another convolution it is not."""
    layers = {"first": nn.Conv2d(64, 64, 3, padding=1), "second": nn.Conv2d(64, 64, 1)}
    model = Of(lambda self, x: self.second(self.first(x).relu()), **layers)
    x = torch.randn(2, 64, 40, 36)
    compiled = compile_at(level, model)
    hold(compiled, model, x)
    assert sum(row[2] for row in region_rows(compiled) if row[0] == "convolution") == 2


def test_no_images_and_sizes_that_change() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    model = block(layer)
    for level in ("O1", "O2"):
        compiled = compile_at(level, model, dynamic=True)
        for batch, size in ((2, 40), (3, 33), (0, 20)):
            hold(compiled, model, torch.randn(batch, 64, size, size + 1))


def test_inductors_own_convolutions_stay_in_rows() -> None:
    """Groups that nobody takes; Inductor would lay their images channels last and back."""
    layer = nn.Conv2d(48, 48, 3, padding=1, groups=3)
    x = image(layer)
    compiled = compile_at("O2", layer)
    hold(compiled, layer, x)
    assert not region_rows(compiled)
    wide = torch.randn(8, 48, 48, 48)
    assert generated_copies(compiled, wide) == 0
    users = compile_at("O2", layer, options={"inductor": {"layout_optimization": True}})
    assert generated_copies(users, wide) > 0


def generated_copies(compiled: Any, x: Tensor) -> int:
    """Kernels that Inductor wrote for this graph, whose one operator is torch's."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with torch.no_grad(), no_cached_graphs():
        _, (code, *_) = run_and_get_code(compiled, x)
    return sum(line.strip().startswith("cpp_fused") for line in code.splitlines())


def test_height_and_width_that_change_before_a_convolution_of_torchs() -> None:
    """Its image is handed out in rows, with strides that are products of two symbols: Inductor
    cannot compare them (torch 2.13), and need not."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=2)).eval()
    compiled = compile_at("O2", model, dynamic=True)
    for sizes in ((20, 24), (31, 17)):
        hold(compiled, model, torch.randn(2, 3, *sizes))
    assert_ran_as_planned(compiled, "O2")
