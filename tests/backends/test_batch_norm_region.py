"""BatchNorm in training: numbers, gradients and running statistics, and who summed up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import kernels, no_cached_graphs
from tests.support.reports import fallbacks_of, graph_reports


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def block() -> nn.Module:
    """Where the first ReLU's output is kept for the backward, and of the last one its mask."""
    first, second = nn.Conv2d(3, 20, 3, bias=False), nn.Conv2d(20, 9, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(20), nn.ReLU(), second, nn.BatchNorm2d(9), nn.ReLU())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.again = nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.again(torch.relu(self.norm(x))) + x)


# What it is, an input, and how many are summed up in the forward and in the backward.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "matrix": (lambda: nn.BatchNorm1d(33), lambda: torch.randn(70, 33), 1),
    "lines": (lambda: nn.BatchNorm1d(5), lambda: torch.randn(4, 5, 77), 1),
    "images": (block, lambda: torch.randn(4, 3, 20, 18), 2),
    "channels last": (
        block,
        lambda: torch.randn(4, 3, 20, 18).to(memory_format=torch.channels_last),
        2,
    ),
    "volumes": (lambda: nn.BatchNorm3d(6), lambda: torch.randn(2, 6, 5, 7, 9), 1),
    "residual": (Residual, lambda: torch.randn(4, 6, 9, 10), 2),
    "without weights": (
        lambda: nn.BatchNorm2d(6, affine=False),
        lambda: torch.randn(4, 6, 9, 10),
        1,
    ),
    "without statistics": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        lambda: torch.randn(4, 6, 9, 10),
        1,
    ),
    "of each instance": (
        lambda: nn.InstanceNorm2d(6, affine=True),
        lambda: torch.randn(4, 6, 19, 10),
        1,
    ),
}


def trained(model: Any, of: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Two steps: outputs, gradients, and what the layer keeps."""
    found = []
    for scale in (1.0, 2.0):
        own = (x * scale).detach().requires_grad_()
        of.zero_grad()
        out = model(own)
        out.backward(grad)
        found += [out.detach(), own.grad, *(one.grad.clone() for one in of.parameters())]
    return [*found, *(one.clone() for one in of.buffers())]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    make, given, count = CASES[name]
    model, x = make(), given() + 1
    grad = torch.randn_like(model(x))
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", model, dynamic=False)
    got = trained(compiled, model, x, grad)
    eager = trained(own, own, x, grad)
    exact = trained(wide, wide, x.double(), grad.double())
    assert_contract(got, eager, exact, name)
    assert not fallbacks_of(compiled)
    (graph,) = graph_reports(compiled)
    rows = [row for row in graph.as_dict()["regions"] if row["region"] == "batch_norm"]
    assert [(row["provider"], row["count"]) for row in rows] == [("openmp", count)] * 2
    assert [row["runs"] for row in rows if not row["backward"]] == [2 * count]


@pytest.mark.wide
def test_gradients_lie_as_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor wrote them in rows beside images that lay channels last, and both were copied."""
    convolutions = [nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)]
    layers = [(one, nn.BatchNorm2d(one.out_channels), nn.ReLU6()) for one in convolutions]
    model = nn.Sequential(*(layer for block in layers for layer in block))
    compiled, x = compile_at("O2", model, dynamic=False), torch.randn(2, 4, 9, 9)
    compiled(x).sum().backward()
    packet = torch.ops.kernel_dispatch.openmp_norm_sums
    ours, strides = packet.default, []

    def summed(grad: Tensor, image: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        strides.append((grad.stride(), image.stride()))
        return ours(grad, image, mean)

    monkeypatch.setattr(packet, "default", summed)
    compiled(x).sum().backward()
    assert len(strides) == 3
    assert all(grad == image and image[1] == 1 for grad, image in strides)


def test_sizes_that_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    wide = copy.deepcopy(model).double()
    own = copy.deepcopy(model)
    compiled = compile_at("O2", model, dynamic=True)
    for batch, size in ((2, 9), (5, 12)):
        x = torch.randn(batch, 3, size, size)
        grad = torch.randn_like(own(x))
        wide(x.double())
        model(x)
        found = [
            trained(one, of, x.to(kind), grad.to(kind))
            for one, of, kind in (
                (compiled, model, torch.float32),
                (own, own, torch.float32),
                (wide, wide, torch.float64),
            )
        ]
        assert_contract(*found, f"batch {batch}")
    for graph in graph_reports(compiled):
        assert "batch_norm" in {row["region"] for row in graph.as_dict()["regions"]}
    assert not fallbacks_of(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_lie_as_images_whose_sizes_change(channels_last: bool) -> None:
    """Strides of unknown sizes can be put into order by what is known of the sizes only."""
    layers = [nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 16, 1))
    options = {"inductor": {"layout_optimization": channels_last}}
    compiled = compile_at("O2", model, options=options, dynamic=True)
    for batch, height, width in ((4, 20, 24), (6, 16, 30)):
        compiled(torch.randn(batch, 8, height, width)).sum().backward()
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_inductors(dtype: torch.dtype) -> None:
    model = nn.BatchNorm2d(6).to(dtype)
    compiled = compile_at("O2", model)
    compiled(torch.randn(4, 6, 9, 10, dtype=dtype)).sum().backward()
    (graph,) = graph_reports(compiled)
    assert "batch_norm" not in {row["region"] for row in graph.as_dict()["regions"]}


def test_it_can_be_switched_off() -> None:
    model = nn.BatchNorm2d(6)
    compiled = compile_at("O2", model, options={"disable": "openmp"})
    compiled(torch.randn(4, 6, 9, 10)).sum().backward()
    (graph,) = graph_reports(compiled)
    assert "batch_norm" not in {row["region"] for row in graph.as_dict()["regions"]}
