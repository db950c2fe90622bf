"""Convolutions that read every pixel once are linear layers, and no others are."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lowering.native import library
from tests.support.compiling import compile_at
from tests.support.modules import in_double
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.regions import compile_in, hold, kernels, no_cached_graphs, region_rows
from tests.support.reports import fallbacks_of, graph_reports

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
WHOLE = {
    "frames": (3, 3, 24, (2, 6, 4), {"stride": (2, 6, 4), "bias": False}),
    "critic": (2, 16, 1, (4, 4), {}),
    "classifier": (2, 8, 20, (5, 3), {"padding": "valid", "stride": 2}),
    "signal": (1, 6, 12, (9,), {"stride": 9}),
}


class Layer(nn.Module):
    """A convolution, and something behind it that is no region."""

    def __init__(self, dimensions: int, *sizes: Any, **settings: Any) -> None:
        super().__init__()
        self.layer = CONVOLUTIONS[dimensions](*sizes, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x))


def _whole(name: str) -> tuple[Layer, torch.Tensor]:
    dimensions, inputs, outputs, kernel, settings = WHOLE[name]
    return (
        Layer(dimensions, inputs, outputs, kernel, **settings).eval(),
        torch.randn(7, inputs, *kernel),
    )


def _taken(compiled: Any) -> set[str]:
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    return {region for region, *_ in region_rows(compiled)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["O1 mkldnn", "O2 openmp"])
@pytest.mark.parametrize("name", WHOLE)
def test_images_as_large_as_the_kernel(name: str, place: str, dtype: torch.dtype) -> None:
    """The weight's rows are kept, so that a layer can pack them."""
    model, x = (given.to(dtype) for given in _whole(name))
    with no_cached_graphs():
        compiled = compile_in(place, model, dynamic=False)
        hold(compiled, model, x, where=name)
    assert _taken(compiled) - {"linear"} == {"from_weights"}
    if place == "O2 openmp" and dtype is torch.float32 and library.is_loaded():
        assert ("linear", "openmp", 1, 1) in region_rows(compiled)


def test_o0_is_eager() -> None:
    model, x = _whole("frames")
    with torch.no_grad():
        assert_bit_identical(compile_at("O0", model)(x), model(x), "O0")


def test_any_number_of_images() -> None:
    model, _ = _whole("frames")
    compiled = compile_at("O2", model, dynamic=True)
    for images in (2, 9, 4):
        hold(compiled, model, torch.randn(images, 3, 2, 6, 4), where=str(images))
    assert "convolution" not in _taken(compiled)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients(level: str) -> None:
    model, x = _whole("frames")
    x.requires_grad_()

    def gradients(function: Any, x: torch.Tensor, model: nn.Module) -> tuple[Any, ...]:
        wanted = (x, *model.parameters())
        return torch.autograd.grad(function(x).square().sum(), wanted)

    got = gradients(compile_at(level, model, dynamic=False), x, model)
    double = copy.deepcopy(model).double()
    exact = gradients(double, x.detach().double().requires_grad_(), double)
    assert_contract(got, gradients(model, x, model), exact, level)


@pytest.mark.parametrize("change", ["in place", "data", "another"])
def test_a_changed_weight_shows(change: str) -> None:
    model, x = _whole("frames")
    compiled = compile_at("O2", model, dynamic=False)
    hold(compiled, model, x)
    weight = model.layer.weight
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "data":
            weight.data = torch.randn_like(weight)
        else:
            model.layer.weight = nn.Parameter(torch.randn_like(weight))
    hold(compiled, model, x, where=change)


@pytest.mark.parametrize("trained", [True, False])
def test_the_kept_rows_are_the_weights_own_memory(trained: bool) -> None:
    """And keep no model alive."""
    model, x = _whole("frames")
    model.requires_grad_(trained)
    compiled = compile_at("O2", model, dynamic=False)
    hold(compiled, model, x)
    (graph,) = graph_reports(compiled)
    (row,) = [row for row in graph.as_dict()["regions"] if row["region"] == "from_weights"]
    assert row["packed_bytes"] == 0
    (kept,) = [one for one in gc.get_objects() if _is_view_of(one, model.layer.weight)]
    assert kept._base is not model.layer.weight
    gone = weakref.ref(model.layer.weight)
    del model, compiled, kept
    gc.collect()
    assert gone() is None


def _is_view_of(one: Any, weight: torch.Tensor) -> bool:
    return (
        type(one) is torch.Tensor
        and one.dim() == 2
        and one.numel() == weight.numel()
        and one.data_ptr() == weight.data_ptr()
    )


def test_one_behind_another() -> None:
    """Also where one gives the other's weight."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv3d(3, 16, 2, stride=2)
            self.second = nn.Conv3d(16, 8, (2, 2, 3))

        def forward(self, x: torch.Tensor) -> Any:
            inner = self.first(x)
            return self.second(inner), nn.functional.conv3d(inner, self.first(x))

    model = Both().eval()
    compiled = compile_at("O2", model, dynamic=False)
    hold(compiled, model, torch.randn(2, 3, 4, 4, 6))
    assert "convolution" not in _taken(compiled)


def test_a_kernel_whose_size_changes_stays_one_graph() -> None:
    def correlated(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(x, x)

    compiled = compile_at("O2", correlated, dynamic=True)
    for size in (8, 9, 12):
        x = torch.randn(2, 3, size)
        assert_contract(compiled(x), correlated(x), correlated(x.double()), str(size))
    assert len(graph_reports(compiled)) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 4, 4).to(dtype), torch.randn(5, 3, 4, 4).to(dtype)
    compiled = compile_at("O2", nn.functional.conv2d, dynamic=False)
    own = nn.functional.conv2d(x, weight)
    assert torch.allclose(compiled(x, weight), own, rtol=1e-4, atol=1e-4)
    assert not fallbacks_of(compiled)


def test_no_channels() -> None:
    x, weight = torch.randn(2, 0, 4, 4), torch.randn(5, 0, 4, 4)
    compiled = compile_at("O1", nn.functional.conv2d, dynamic=False)
    assert compiled(x, weight).shape == nn.functional.conv2d(x, weight).shape


# --- more than one patch --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_patches_of_videos(level: str, memory: torch.memory_format) -> None:
    model = Layer(3, 3, 16, (2, 4, 4), stride=(2, 4, 4)).eval()
    x = torch.randn(2, 3, 4, 12, 8).to(memory_format=memory)
    with no_cached_graphs():
        compiled = compile_at(level, model, dynamic=False)
        hold(compiled, model, x)
    assert "convolution" not in _taken(compiled)


LEFT = {
    "a border": ((2, 3, 8, 4), {"padding": 1}, (4, 4)),
    "groups": ((2, 4, 8, 4), {"groups": 2}, (4, 4)),
    "gaps": ((2, 3, 8, 2), {"dilation": 3}, (4, 4)),
    "patches that overlap": ((3, 3, 8, 4), {"stride": 2}, (4, 8, 8)),
    "pixels left over": ((3, 3, 8, 4), {"stride": 4}, (4, 8, 9)),
    "single pixels": ((2, 3, 8, 1), {}, (1, 1)),
    "patches of images": ((2, 3, 8, 4), {"stride": 4}, (8, 8)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_a_convolution(case: str) -> None:
    kernels()
    sizes, settings, image = LEFT[case]
    model = Layer(*sizes, **settings).eval()
    with no_cached_graphs():
        compiled = compile_at("O2", model, dynamic=False)
        hold(compiled, model, torch.randn(2, sizes[1], *image), where=case)
    assert _taken(compiled) <= {"convolution"}  # small ones are nobody's region


def test_who_lets_products_lose_bits_has_not_said_so_of_convolutions() -> None:
    model, x = _whole("frames")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad():
            got = compile_at("O2", model, dynamic=False)(x)
            assert_contract(got, model(x), in_double(model, x), "medium")
    finally:
        torch.set_float32_matmul_precision(before)
