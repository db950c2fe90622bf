"""Convolutions in training steps: numbers, gradients, how images lie, and who computed them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowering import machine
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import kernels, no_cached_graphs
from tests.support.reports import fallbacks_of, graph_reports

pytestmark = pytest.mark.skipif(
    "avx2" not in machine.cpu().isa, reason="taken on CPUs with AVX2 and AVX-512 only"
)
WIDE = not machine.cpu().ends_at_avx2
OPERATOR = "openmp_training_convolution"


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    kernels()
    with size_limits_lifted(), no_cached_graphs():
        yield


def stem(channels: int) -> nn.Module:
    """What makes an image channels last of one in rows, and is oneDNN's."""
    return nn.Conv2d(3, channels, 2)


class Several(nn.Module):
    """Models of one graph: each has an image, a result and gradients of its own."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(models.values())

    def forward(self, *images: Tensor) -> list[Tensor]:
        return [part(image) for part, image in zip(self.parts, images, strict=True)]


def steps(model: Any, of: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Two steps with other weights: results, and gradients of images and parameters."""
    found: list[Tensor] = []
    for _ in range(2):
        of.zero_grad()
        own = [image.detach().clone().requires_grad_() for image in images]
        results = model(*own)
        torch.autograd.backward(results, [_like(result) for result in results])
        found += [one.detach() for one in results]
        found += [one.grad.clone() for one in (*own, *of.parameters()) if one.grad is not None]
        with torch.no_grad():
            for one in of.parameters():
                one.mul_(1.25)  # exactly, in any precision
    return found


def _like(result: Tensor) -> Tensor:
    """The same numbers for every dtype."""
    random = torch.Generator().manual_seed(result.numel())
    return torch.randn(result.shape, generator=random).to(result.dtype)


def assert_trains(model: nn.Module, images: list[Tensor], name: str = "") -> Any:
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", model, dynamic=False)
    got = steps(compiled, model, images)
    eager = steps(own, own, images)
    exact = steps(wide, wide, [image.double() for image in images])
    assert_contract(got, eager, exact, name)
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    return compiled


def counts(compiled: Any) -> tuple[int, int]:
    """How many in the forward, and in the backward."""
    (graph,) = graph_reports(compiled)
    rows = [row for row in graph.as_dict()["regions"] if row["region"] == "training_convolution"]
    assert all(row["provider"] == "openmp" for row in rows)
    found = {row["backward"]: row["count"] for row in rows}
    for row in rows:
        assert row["backward"] or row["runs"] == 2 * row["count"]
    return found.get(False, 0), found.get(True, 0)


# Those that are taken, behind a stem of so many channels; and in how many directions.
# With AVX2 eager's long sums in the forward are as inexact, and single pixels gain nothing.
TAKEN: dict[str, tuple[int, nn.Module, tuple[int, int]]] = {
    "tiles": (32, nn.Conv2d(32, 40, 3, padding=1), (1, 1)),
    "tiles without padding or bias": (40, nn.Conv2d(40, 32, 3, bias=False), (1, 1)),
    "tiles of few channels": (24, nn.Conv2d(24, 24, 3, padding=1), (WIDE, WIDE)),
    "tiles of phases": (32, nn.Conv2d(32, 32, 3, padding=2, dilation=2), (1, 1)),
    "more padding than a turned kernel has": (32, nn.Conv2d(32, 32, 3, padding=3), (1, 0)),
    "long sums": (48, nn.Conv2d(48, 16, 5, padding=2), (WIDE, 0)),
    "long sums of the gradient": (16, nn.Conv2d(16, 64, 5, padding=(0, 4)), (0, 1)),
    "long sums with a stride": (80, nn.Conv2d(80, 24, 3, stride=2, padding=1), (WIDE, 0)),
    "kernels that are not square": (96, nn.Conv2d(96, 32, (1, 7), padding=(0, 3)), (WIDE, 0)),
    "single pixels": (24, nn.Conv2d(24, 40, 1), (WIDE, WIDE)),
}
# Those that are not: oneDNN is as fast, and as exact.
LEFT = {
    "short sums": (16, nn.Conv2d(16, 24, 5, stride=2)),
    "groups": (32, nn.Conv2d(32, 64, 3, padding=1, groups=2)),
    "each channel by itself": (32, nn.Conv2d(32, 32, 3, padding=1, groups=32)),
    "single pixels with a stride": (24, nn.Conv2d(24, 40, 1, stride=2)),
}


def test_layers_of_all_kinds() -> None:
    torch.manual_seed(0)
    models = {name: nn.Sequential(stem(n), layer) for name, (n, layer, _) in TAKEN.items()}
    images = [torch.randn(2, 3, 33, 35) for _ in models]
    compiled = assert_trains(Several(models), images)
    forward, backward = (sum(taken[side] for *_, taken in TAKEN.values()) for side in (0, 1))
    assert counts(compiled) == (forward, backward)


def test_layers_that_are_left() -> None:
    models = {name: nn.Sequential(stem(n), layer) for name, (n, layer) in LEFT.items()}
    compiled = assert_trains(Several(models), [torch.randn(2, 3, 33, 35) for _ in models])
    assert counts(compiled) == (0, 0)


def test_long_sums_keep_the_contract() -> None:
    """In one chain oneDNN's were off by 4 times eager's error."""
    layers = [stem(128), nn.Conv2d(128, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 7)]
    compiled = assert_trains(Several({"": nn.Sequential(*layers)}), [torch.randn(2, 3, 41, 41)])
    assert counts(compiled) == (1 + WIDE, 1)


def test_nobody_copies_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes what is read, gradients too, channels last, and leaves weights in rows."""
    layers = [(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(stem(32), *(layer for block in layers for layer in block))
    compiled, x = compile_at("O2", model, dynamic=False), torch.randn(2, 3, 33, 33)
    compiled(x).sum().backward()
    packet = getattr(torch.ops.kernel_dispatch, OPERATOR)
    ours, seen = packet.default, []

    def computed(image: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append((image.stride()[1], weight.is_contiguous()))
        result: Tensor = ours(image, weight, *rest)
        return result

    monkeypatch.setattr(packet, "default", computed)
    compiled(x).sum().backward()
    assert seen == [(1, True)] * 6


def test_weights_are_packed_and_not_kept() -> None:
    from lowering.native import library

    model = nn.Sequential(stem(32), nn.Conv2d(32, 32, 3, padding=1))
    compiled = compile_at("O2", model, dynamic=False)
    before = library.packed_bytes()
    compiled(torch.randn(2, 3, 33, 33)).sum().backward()
    assert counts_once(compiled) and library.packed_bytes() == before


def counts_once(compiled: Any) -> bool:
    (graph,) = graph_reports(compiled)
    return "training_convolution" in {row["region"] for row in graph.as_dict()["regions"]}


def test_infinities_stay_where_they_are() -> None:
    """A tile would spread them to outputs that do not depend on them."""
    model = nn.Sequential(stem(32), nn.Conv2d(32, 32, 3, padding=1))
    x = torch.randn(1, 3, 33, 33)
    x[0, :, 16, 16] = float("inf")
    own, compiled = copy.deepcopy(model), compile_at("O2", model, dynamic=False)
    got, eager = compiled(x), own(x)
    assert torch.equal(got.isfinite(), eager.isfinite()) and not eager.isfinite().all()
    got.sum().backward()
    assert counts_once(compiled)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"disable": "openmp"}, "switched off"),
        ({"inductor": {"layout_optimization": False}}, "images stay in rows"),
    ],
)
def test_it_can_be_switched_off(options: dict[str, Any], why: str) -> None:
    model = nn.Sequential(stem(32), nn.Conv2d(32, 32, 3, padding=1))
    compiled = compile_at("O2", model, options=options, dynamic=False)
    compiled(torch.randn(2, 3, 33, 33)).sum().backward()
    assert not counts_once(compiled), why


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_onednns(dtype: torch.dtype) -> None:
    model = nn.Sequential(stem(32), nn.Conv2d(32, 32, 3, padding=1)).to(dtype)
    compiled = compile_at("O2", model, dynamic=False)
    compiled(torch.randn(2, 3, 33, 33, dtype=dtype)).sum().backward()
    assert not fallbacks_of(compiled) and not counts_once(compiled)


def test_sizes_that_change() -> None:
    model = nn.Sequential(stem(32), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU())
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", Several({"": model}), dynamic=True)
    for batch, size in ((2, 33), (3, 40)):
        images = [torch.randn(batch, 3, size, size)]
        found = [
            steps(one, of, [image.to(kind) for image in images])
            for one, of, kind in (
                (compiled, model, torch.float32),
                (Several({"": own}), own, torch.float32),
                (Several({"": wide}), wide, torch.float64),
            )
        ]
        assert_contract(*found, f"batch {batch}")
    assert not fallbacks_of(compiled)
    for graph in graph_reports(compiled):
        assert "training_convolution" in {row["region"] for row in graph.as_dict()["regions"]}


def test_one_behind_the_other() -> None:
    """Each reads what stands for the one before; what is saved between them is channels last."""
    layers = [nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 48, 3), nn.ReLU()]
    model = Several({"": nn.Sequential(stem(32), *layers, nn.Conv2d(48, 32, 3))})
    assert counts(assert_trains(model, [torch.randn(2, 3, 33, 33)])) == (3, 3)


def test_results_lie_as_eagers() -> None:
    """Also a view of one, what a graph break hands on, and memory that is read as it lies."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(stem(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            image = self.layers(x)
            memory = torch.as_strided(image.contiguous(), (2, 32, 24, 8), (32768, 1024, 24, 3))
            return image, image.view(len(x), -1), memory.sin()

    model, x = Reads(), torch.randn(2, 3, 33, 33)
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at("O2", model, dynamic=False)
    got, eager, exact = compiled(x), own(x), wide(x.double())
    assert [one.stride() for one in got] == [one.stride() for one in eager]
    assert_contract(got, eager, exact, "")
    assert not fallbacks_of(compiled) and counts_once(compiled)
    torch.autograd.grad(got[0].square().sum(), model.layers[2].weight, create_graph=True)


def test_results_of_one_channel_lie_as_eagers() -> None:
    """Such an image lies in rows and channels last at once."""
    model, x = nn.Conv2d(1, 32, 1), torch.randn(2, 1, 160, 160)
    compiled = compile_at("O2", lambda x: model(x).sin(), dynamic=False)
    assert compiled(x).stride() == model(x).sin().stride()
    assert not fallbacks_of(compiled)
