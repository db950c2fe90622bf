"""Gradients of weights of convolutions of images channels last: numbers, and who computed them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from lowering import machine
from tests.backends.test_training_convolutions import Several, assert_trains, stem
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import kernels, no_cached_graphs
from tests.support.reports import fallbacks_of, graph_reports

aten = torch.ops.aten
taken = pytest.mark.skipif(not machine.cpu().ends_at_avx2, reason="taken with AVX2 alone")


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def given(channels: tuple[int, int], image: tuple[int, ...], layer: dict[str, object]) -> Any:
    own = nn.Conv2d(*channels, **layer)  # type: ignore[arg-type]
    x = torch.randn(image[0], channels[0], *image[1:]).to(memory_format=torch.channels_last)
    return own, torch.randn_like(own(x)), x


def eagers(own: nn.Conv2d, grad: Tensor, x: Tensor) -> Tensor:
    where = (own.stride, own.padding, own.dilation, False, [0, 0], 1, [False, True, False])
    weight = own.weight.to(x.dtype)
    gradient: Tensor = aten.convolution_backward(grad, x, weight, None, *where)[1]
    return gradient


def ours(own: nn.Conv2d, grad: Tensor, x: Tensor) -> Tensor:
    where = (own.kernel_size, own.stride, own.padding, own.dilation)
    gradient: Tensor = torch.ops.kernel_dispatch.openmp_weight_gradient(grad, x, *where)
    return gradient


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("channels", "image", "layer"),
    [
        ((20, 13), (3, 9, 11), {"kernel_size": 3, "padding": 1}),
        ((16, 6), (2, 14, 9), {"kernel_size": (5, 3), "stride": (2, 1), "dilation": (1, 2)}),
        ((33, 40), (1, 7, 300), {"kernel_size": 3, "stride": (1, 2), "padding": 1}),
        ((16, 16), (5, 7, 7), {"kernel_size": 7, "padding": 3}),
        ((32, 8), (9, 4, 4), {"kernel_size": 3, "stride": 3, "padding": 2, "dilation": 2}),
        ((3, 5), (2, 5, 6), {"kernel_size": 2}),
        ((128, 6), (200, 14, 14), {"kernel_size": 14}),  # whole images: some at a time
    ],
)
def test_the_operator(
    channels: tuple[int, int], image: tuple[int, ...], layer: dict[str, object], threads: int
) -> None:
    """Lines of several images in a chunk, odd channels, and tangents in rows as well."""
    own, grad, x = given(channels, image, layer)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = ours(own, grad, x)
    finally:
        torch.set_num_threads(before)
    assert got.shape == own.weight.shape and got.is_contiguous()
    exact = eagers(own, grad.double(), x.double())
    assert_contract(got, eagers(own, grad, x), exact, str(layer))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("of_image", [False, True])
def test_what_is_not_finite_stays_where_it_is(number: float, of_image: bool) -> None:
    """At an edge: infinite times the zeros around an image would be no number."""
    own, grad, x = given((20, 13), (2, 9, 11), {"kernel_size": 3, "padding": 1})
    (x if of_image else grad)[1, 2, 0, -1] = number
    got, eager = ours(own, grad, x), eagers(own, grad, x)
    assert 0 < (~eager.isfinite()).sum() < eager.numel() / 4
    torch.testing.assert_close(got, eager, equal_nan=True, rtol=1e-4, atol=1e-4)


@taken
def test_they_are_taken() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 5, stride=2)]
    model = Several({"": nn.Sequential(stem(32), *layers, nn.Conv2d(16, 8, 1))})
    compiled = assert_trains(model, [torch.randn(2, 3, 65, 65)])
    (graph,) = graph_reports(compiled)
    (row,) = [one for one in graph.as_dict()["regions"] if one["region"] == "weight_gradient"]
    assert (row["provider"], row["count"], row["backward"]) == ("openmp", 2, True)


@taken
def test_padding_that_changes() -> None:
    """A number that is not known while compiling, where the image needs a gradient, too."""
    layer = nn.Conv2d(24, 22, 3, bias=False)

    def padded(m: Any, x: Tensor, padding: int) -> Tensor:
        return conv2d(x * 1.5, m.layer.weight, None, 1, padding).relu()

    model = Of(padded, layer=layer)
    compiled = compile_at("O2", model, dynamic=True)
    for padding in (2, 4):
        x = torch.randn(2, 24, 20, 21).to(memory_format=torch.channels_last)
        found = []
        for one in (compiled, model):
            own = x.detach().clone().requires_grad_()
            one(own, padding).square().mean().backward()
            assert own.grad is not None and layer.weight.grad is not None
            found.append((own.grad, layer.weight.grad))
            layer.weight.grad = None
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    rows = [row for graph in graph_reports(compiled) for row in graph.as_dict()["regions"]]
    assert "weight_gradient" in {row["region"] for row in rows}


@taken
def test_a_gradient_that_is_a_result_lies_as_eagers() -> None:
    def own(m: Any, weight: Tensor, x: Tensor) -> Tensor:
        def loss(weight: Tensor) -> Tensor:
            twice = conv2d(conv2d(x * 1.1, weight, padding=1), weight, padding=1)
            return twice.square().mean()

        return torch.func.grad(loss)(weight)

    x = torch.randn(2, 24, 40, 41).to(memory_format=torch.channels_last)
    model, weight = Of(own), torch.randn(24, 24, 3, 3)
    with torch.no_grad():
        compiled = compile_at("O2", model, dynamic=False)
        got, eager = compiled(weight, x), model(weight, x)
        exact = model(weight.double(), x.double())
    assert got.stride() == eager.stride()
    assert_contract(got, eager, exact, "gradient")
    (graph,) = graph_reports(compiled)
    assert "weight_gradient" in {row["region"] for row in graph.as_dict()["regions"]}
