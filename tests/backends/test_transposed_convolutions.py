"""Transposed convolutions, whoever takes them: numbers, where outputs lie, and the report."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowering import machine
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of, used
from tests.support.regions import (
    assert_regions,
    compile_in,
    hold,
    kernels,
    no_cached_graphs,
    places,
    provider_at,
    region_rows,
)
from tests.support.reports import graph_reports

LAYERS = {
    "lines": nn.ConvTranspose1d(8, 6, 4, 2, 1),
    "doubling": nn.ConvTranspose2d(8, 6, 4, 2, 1),
    "grouped": nn.ConvTranspose2d(8, 12, 3, 2, 1, 1, groups=2, bias=False),
    "by channel": nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=8),
    "dilated": nn.ConvTranspose2d(8, 7, 3, dilation=2),
    "uneven": nn.ConvTranspose2d(8, 5, (2, 5), (3, 2), (0, 2), (1, 0), dilation=(1, 2)),
    "21 classes": nn.ConvTranspose2d(8, 21, 4, 2, 1),
    "pointwise": nn.ConvTranspose2d(8, 16, 1),
    "volume": nn.ConvTranspose3d(8, 6, 4, 2, 1),
    "grouped volume": nn.ConvTranspose3d(8, 6, 3, 2, 1, 1, groups=2),
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
every_place = places()


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def images(layer: Any, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 8, *(7, 9, 5)[: len(layer.kernel_size)])


def takes(place: str, layer: Any, half: bool = False) -> bool:
    """Does the provider at this place take such a layer?"""
    dims = len(layer.kernel_size)
    if provider_at(place) == "mkldnn":
        return dims > 2 or (dims == 2 and (divides(layer) or not machine.cpu().ends_at_avx2))
    fills = layer.out_channels != 21 or half
    plain = layer.groups == 1 and set(layer.dilation) == {1}
    return dims < 3 and plain and fills and covers(layer)


def divides(layer: Any) -> bool:
    """Has each pixel as many taps? oneDNN is slow elsewhere with AVX2 alone."""
    sizes = zip(layer.kernel_size, layer.stride, strict=True)
    return all(size % step == 0 for size, step in sizes)


def covers(layer: Any) -> bool:
    sizes = zip(layer.kernel_size, layer.stride, strict=True)
    return all(size >= step for size, step in sizes)


def normed(layer: Any) -> nn.Sequential:
    kinds: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norm = kinds[len(layer.kernel_size) - 1](layer.out_channels)
    nn.init.uniform_(norm.weight, 0.5, 2)
    return nn.Sequential(layer, norm, nn.ReLU())


@pytest.mark.sampled(2)
@every_layer
def test_the_layer_alone(layer: Any) -> None:
    """Ours where it can, else oneDNN's."""
    compiled = compile_at("O2", layer)
    hold(compiled, layer, images(layer))
    hold(compiled, layer, images(layer).movedim(1, -1).contiguous().movedim(-1, 1))
    takers = [name for name in ("openmp", "mkldnn") if takes(f"O2 {name}", layer)][:1]
    expected = {("transposed_convolution", provider) for provider in takers}
    assert {row[:2] for row in region_rows(compiled)} == expected


@pytest.mark.sampled(3)
@every_place
@every_layer
def test_what_follows_is_absorbed(place: str, layer: Any) -> None:
    x = images(layer)
    model = used(normed(layer), x)
    with no_cached_graphs():
        compiled = compile_in(place, model)
        hold(compiled, model, x)
    if not takes(place, layer):
        assert not [row for row in region_rows(compiled) if row[0] == "transposed_convolution"]
        return
    assert_regions(compiled, ("transposed_convolution", provider_at(place), 1, 1))
    (region,) = graph_reports(compiled)[0].regions
    assert region.recipes == ("fold-batch-norm", "prepack")
    assert region.detail == "with relu"


@every_place
def test_weights_that_change_show(place: str) -> None:
    x = torch.randn(2, 8, 7, 9)
    model = used(normed(nn.ConvTranspose2d(8, 6, 4, 2, 1)), x)
    compiled = compile_in(place, model)
    hold(compiled, model, x)
    for index in (0, 1):
        with torch.no_grad():
            model[index].weight.mul_(1.5)
            model[index].bias.add_(1)
        hold(compiled, model, x, where=f"after layer {index} changed")
    assert_regions(compiled, ("transposed_convolution", provider_at(place), 1, 3))


@places("O2 mkldnn", "O2 openmp")
def test_sizes_that_change_and_no_image_at_all(place: str) -> None:
    model = nn.ConvTranspose2d(8, 6, 3, 2, 1, 1).eval()
    compiled = compile_in(place, model, dynamic=True)
    for batch, size in ((2, 7), (3, 12), (0, 5), (4, 31)):
        hold(compiled, model, torch.randn(batch, 8, size, size + 1))


@places("O2 mkldnn", "O2 openmp")
def test_an_image_without_rows_is_eagers_error(place: str) -> None:
    """Its output would not be empty, so nothing may come of it."""
    model = nn.ConvTranspose2d(8, 6, 4, 2, 1).eval()
    compiled = compile_in(place, model, dynamic=True)
    hold(compiled, model, torch.randn(2, 8, 7, 9))
    none = torch.randn(2, 8, 0, 5)
    for run in (model, compiled):
        with torch.no_grad(), pytest.raises(RuntimeError):
            run(none)
    geometry = ([2, 2], [1, 1], [0, 0])
    with pytest.raises(RuntimeError):
        if provider_at(place) == "mkldnn":
            kernels().mkldnn_transposed_convolution(
                none, model.weight, None, [], 0.0, *geometry, [1, 1], 1, "none", "", []
            )
        else:
            norm = (None,) * 4
            kernels().openmp_transposed_convolution(
                none, model.weight, None, *norm, 0.0, *geometry, 0, 0.0, 0.0
            )


@pytest.mark.parametrize("behind", [nn.Identity(), nn.Tanh()], ids=["alone", "tanh"])
def test_output_padding_beyond_the_stride_is_eagers_error(behind: nn.Module) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 1, 1, output_padding=1), behind).eval()
    compiled = compile_at("O2", model)
    for run in (model, compiled):
        with torch.no_grad(), pytest.raises(RuntimeError, match="output padding must be smaller"):
            run(torch.randn(2, 8, 7, 9))
    assert region_rows(compiled) == []


@pytest.mark.sampled(2)
@every_layer
def test_half_precision(layer: Any) -> None:
    """Computed in float32 from weights that were widened once."""
    half = copy.deepcopy(layer).half()
    compiled = compile_in("O2 openmp", half)
    hold(compiled, half, images(layer).half())
    taken = [row[1] for row in region_rows(compiled) if row[0] == "transposed_convolution"]
    assert taken == (["openmp"] if takes("O2 openmp", layer, half=True) else [])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_nobody_takes_stays_torchs(level: str) -> None:
    gaps = nn.ConvTranspose1d(8, 6, 2, 3).eval()  # some outputs have no input at all
    compiled = compile_at(level, gaps)
    hold(compiled, gaps, torch.randn(2, 8, 11))
    single = nn.ConvTranspose2d(8, 6, 4, 2).eval()
    hold(compile_at(level, single), single, torch.randn(8, 11, 7))
    computed = Of(lambda self, x, w: torch.nn.functional.conv_transpose2d(x, w * 2))
    hold(compile_at(level, computed), computed, torch.randn(2, 8, 5, 5), torch.randn(8, 3, 2, 2))
    assert not [row for row in region_rows(compiled) if row[0] == "transposed_convolution"]


def test_training_is_left_alone() -> None:
    layer = nn.ConvTranspose2d(8, 6, 4, 2, 1)
    compiled = compile_at("O2", layer)
    x = torch.randn(2, 8, 7, 9)
    compiled(x).sum().backward()
    got, layer.weight.grad = layer.weight.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)
    assert not [row for row in region_rows(compiled) if row[0] == "transposed_convolution"]


def test_a_generator() -> None:
    """DCGAN's, small: every layer but the last with a BatchNorm."""
    sizes = ((20, 64, 1, 0), (64, 32, 2, 1), (32, 16, 2, 1))
    layers: list[nn.Module] = []
    for inputs, outputs, stride, padding in sizes:
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    x = torch.randn(4, 20, 1, 1)
    model = used(nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()), x)
    for level, provider in (("O1", "mkldnn"), ("O2", "openmp")):
        compiled = compile_at(level, model)
        hold(compiled, model, x)
        assert_regions(compiled, ("transposed_convolution", provider, 4, 4))


EXACT: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "long sums": (nn.ConvTranspose2d(96, 16, 3, padding=1), (2, 96, 24, 24), False),
    "short sums": (nn.ConvTranspose2d(24, 16, 3, padding=1), (2, 24, 24, 24), True),
    "few pixels to sum": (nn.ConvTranspose2d(96, 16, 4), (2, 96, 1, 1), True),
    "what torch unfolds": (nn.ConvTranspose2d(192, 16, (2, 4), 2), (1, 192, 8, 8), False),
    "several of these": (nn.ConvTranspose2d(96, 16, 4, 2), (2, 96, 8, 8), True),
    "unfolded volume": (nn.ConvTranspose3d(64, 8, 3, 2), (1, 64, 6, 6, 6), False),
    "long sums in groups": (nn.ConvTranspose2d(192, 16, 3, groups=2), (2, 192, 9, 9), False),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_torch_adds_up_in_parts_stays_its_own(name: str) -> None:
    """oneDNN has one chain for it: up to three times what the contract allows was lost."""
    layer, shape, taken = EXACT[name]
    model = nn.Sequential(layer, nn.ReLU()).eval()
    compiled = compile_in("O1 mkldnn", model)
    for _ in range(3):
        hold(compiled, model, torch.randn(shape))
    row = [("transposed_convolution", "mkldnn", 1, 3)]
    assert_regions(compiled, *row * taken)
