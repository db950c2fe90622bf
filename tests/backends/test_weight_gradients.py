"""Gradients of weights of convolutions of images channels last: numbers, and who computed them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowering import machine
from tests.backends.test_training_convolutions import Several, assert_trains, stem
from tests.support.compiling import size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import kernels, no_cached_graphs
from tests.support.reports import graph_reports

aten = torch.ops.aten
taken = pytest.mark.skipif(not machine.cpu().ends_at_avx2, reason="taken with AVX2 alone")


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


@pytest.mark.quick
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
    ],
)
def test_the_operator(
    channels: tuple[int, int], image: tuple[int, ...], layer: dict[str, object], threads: int
) -> None:
    """Lines of several images in a chunk, odd channels, and tangents in rows as well."""
    own = nn.Conv2d(*channels, **layer)  # type: ignore[arg-type]
    x = torch.randn(image[0], channels[0], *image[1:]).to(memory_format=torch.channels_last)
    grad = torch.randn_like(own(x))
    where = (list(own.stride), list(own.padding), list(own.dilation))
    mask = [False, True, False]
    eager, exact = (
        aten.convolution_backward(
            grad.to(kind), x.to(kind), own.weight.to(kind), None, *where, False, [0, 0], 1, mask
        )[1]
        for kind in (torch.float32, torch.float64)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = torch.ops.kernel_dispatch.openmp_weight_gradient
        got = ours(grad, x, list(own.kernel_size), *where)
    finally:
        torch.set_num_threads(before)
    assert got.shape == own.weight.shape and got.is_contiguous()
    assert_contract(got, eager, exact, str(layer))


@taken
def test_they_are_taken() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 5, stride=2)]
    model = Several({"": nn.Sequential(stem(32), *layers, nn.Conv2d(16, 8, 1))})
    compiled = assert_trains(model, [torch.randn(2, 3, 65, 65)])
    (graph,) = graph_reports(compiled)
    (row,) = [one for one in graph.as_dict()["regions"] if one["region"] == "weight_gradient"]
    assert (row["provider"], row["count"], row["backward"]) == ("openmp", 2, True)
