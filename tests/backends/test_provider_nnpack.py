"""Convolutions through NNPACK: numbers, report, layout, fresh weights, and when it is not used."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import pipeline
from lowering.providers import nnpack
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.reports import assert_ran_as_planned

if not nnpack.probe().available:
    pytest.skip(nnpack.probe().reason, allow_module_level=True)

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NNPACK's pool may be larger where the suite runs with more: that decides times only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(nnpack, "_pool", (os.getpid(), 1))
    yield
    torch.set_num_threads(before)
    nnpack.weights.clear()


@pytest.fixture
def measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose profile says that NNPACK is the fastest for every convolution."""
    order = {("convolution", "float32", "spatial"): ("nnpack", "eager")}
    monkeypatch.setattr(pipeline, "_ranking", lambda record: order)


def wide(kernel: int | tuple[int, int] = 5, norm: bool = False, bias: bool = True) -> nn.Module:
    """Large enough for the row's limit, and for transforms to pay."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sides[0] // 2, sides[1] // 2)
    parts: list[nn.Module] = [nn.Conv2d(32, 48, sides, padding=padding, bias=bias)]
    if norm:
        after = nn.BatchNorm2d(48)
        nn.init.uniform_(after.running_mean, -1, 1)
        nn.init.uniform_(after.running_var, 0.5, 2)
        nn.init.uniform_(after.weight, 0.5, 2)
        parts.append(after)
    return nn.Sequential(*parts, nn.ReLU()).eval()


def image(side: int = 48) -> torch.Tensor:
    return torch.randn(1, 32, side, side)


def hold(compiled: Any, model: nn.Module, x: torch.Tensor, where: str) -> torch.Tensor:
    with torch.no_grad():
        got, eager = compiled(x), model(x)
        reference = copy.deepcopy(model).double()(x.double())
    assert_contract(got, eager, reference, where)
    assert got.stride() == eager.stride()
    return got


def regions(compiled: Any) -> list[tuple[str, str, int, int]]:
    return [
        (row["region"], row["provider"], row["count"], row["runs"])
        for graph in kernel_dispatch.report(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] != "graph"
    ]


def by_nnpack(compiled: Any) -> list[int]:
    return [row[3] for row in regions(compiled) if row[1] == "nnpack"]


@pytest.mark.sampled(2)
@LEVELS
@pytest.mark.parametrize("kernel", [5, 7, 8, 9, (5, 7), (5, 9)], ids=str)
def test_numbers_and_report(level: str, kernel: int | tuple[int, int]) -> None:
    model, x = wide(kernel), image()
    compiled = compile_at(level, model)
    for call in range(2):
        hold(compiled, model, x, f"call {call}")
    assert_ran_as_planned(compiled, level)
    assert regions(compiled) == [("convolution", "nnpack", 1, 2)]


@LEVELS
def test_an_image_that_is_not_square(level: str) -> None:
    model, x = wide(5, bias=False), torch.randn(1, 32, 60, 36)
    compiled = compile_at(level, model)
    hold(compiled, model, x, "60x36")
    assert by_nnpack(compiled) == [1]


@LEVELS
def test_images_in_channels_last(level: str) -> None:
    """Outputs lie in memory as eager's do, whatever lies in between."""
    model = wide(5).to(memory_format=torch.channels_last)
    x = image().contiguous(memory_format=torch.channels_last)
    compiled = compile_at(level, model)
    hold(compiled, model, x, "channels last")
    assert by_nnpack(compiled) == [1]


@LEVELS
def test_between_convolutions_of_another_provider(level: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), *wide(5), nn.Conv2d(48, 64, 3, padding=1)
    ).eval()
    x = torch.randn(1, 3, 48, 48)
    compiled = compile_at(level, model)
    hold(compiled, model, x, "in the middle")
    assert by_nnpack(compiled) == [1]
    assert {row[1] for row in regions(compiled)} - {"nnpack"}


@LEVELS
@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_is_folded_and_stays_fresh(level: str, bias: bool) -> None:
    model, x = wide(5, norm=True, bias=bias), image()
    compiled = compile_at(level, model)
    packed = nnpack.weights.packed
    before = hold(compiled, model, x, "before")
    hold(compiled, model, x, "again")
    assert nnpack.weights.packed == packed + 1, "folded again although nothing changed"

    def weight_through_data() -> None:
        model[0].weight.data.mul_(-2)

    def running_mean() -> None:
        model[1].running_mean.add_(1)

    def gain() -> None:
        with torch.no_grad():
            model[1].weight.mul_(2)

    def loaded() -> None:
        state = model.state_dict()
        model.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in state.items()})

    for change in (weight_through_data, running_mean, gain, loaded):
        change()
        after = hold(compiled, model, x, change.__name__)
        assert not torch.equal(before, after), change.__name__
        before = after
    assert by_nnpack(compiled) == [6]


@LEVELS
def test_a_plain_weight_is_read_in_every_call(level: str) -> None:
    model, x = wide(5), image()
    compiled = compile_at(level, model)
    before = hold(compiled, model, x, "before")
    model[0].weight.data[0, 0, 0, 0] += 10  # one element: no counter and no sample would show it
    assert not torch.equal(before, hold(compiled, model, x, "after"))


@LEVELS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_stay_where_they_are(level: str, value: float) -> None:
    """A transform would smear them over a tile: such images go the direct way."""
    model, x = wide(5), image()
    x[0, 3, 7, 9] = value
    compiled = compile_at(level, model)
    hold(compiled, model, x, str(value))
    assert sum(by_nnpack(compiled)) == 0
    hold(compiled, model, image(), "finite")
    assert sum(by_nnpack(compiled)) == 1


@pytest.mark.sampled(2)
@LEVELS
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(32, 48, 5, padding=2), (2, 32, 64, 64)),
        (nn.Conv2d(32, 48, 5, padding=2, stride=2), (1, 32, 96, 96)),
        (nn.Conv2d(32, 48, 5, padding=4, dilation=2), (1, 32, 64, 64)),
        (nn.Conv2d(64, 64, 5, padding=2, groups=2), (1, 64, 64, 64)),
        (nn.Conv2d(32, 48, 5, padding=5), (1, 32, 64, 64)),
        (nn.Conv2d(32, 48, 17), (1, 32, 48, 48)),
        (nn.Conv2d(192, 192, (1, 7), padding=(0, 3)), (1, 192, 17, 17)),  # too few per kernel
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),  # Winograd
        (nn.Conv1d(64, 512, 9), (1, 64, 2048)),
    ],
    ids="images stride dilation groups padding kernel gain winograd 1d".split(),
)
def test_layers_that_are_left_to_others(level: str, layer: nn.Module, shape: Any) -> None:
    model = nn.Sequential(layer).eval()
    compiled = compile_at(level, model, options={"disable": ["mkldnn", "openmp"]})
    x = torch.randn(*shape)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert by_nnpack(compiled) == []


@LEVELS
def test_disabled_and_other_dtypes(level: str) -> None:
    model, x = wide(5), image()
    without = compile_at(level, model, options={"disable": ["nnpack"]})
    hold(without, model, x, "disabled")
    assert by_nnpack(without) == []
    half = compile_at(level, model.bfloat16())
    with torch.no_grad():
        half(x.bfloat16())
    assert by_nnpack(half) == []


def test_training_is_left_alone() -> None:
    model, x = wide(5), image()
    compiled = compile_at("O1", model)
    compiled(x).sum().backward()
    assert by_nnpack(compiled) == []


# --- Winograd: at O3 only, and only where it was measured to be the fastest -----------------------


def three_by_three() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_winograd_is_refused_below_o3(level: str, measured_first: None) -> None:
    compiled = compile_at(level, three_by_three())
    with torch.no_grad():
        compiled(torch.randn(1, 64, 56, 56))
    assert by_nnpack(compiled) == []


def test_winograd_is_not_taken_unmeasured() -> None:
    compiled = compile_at("O3", three_by_three())
    with torch.no_grad():
        compiled(torch.randn(1, 64, 56, 56))
    assert by_nnpack(compiled) == []


def test_winograd_where_it_was_measured(measured_first: None) -> None:
    """Its error is what the documentation says of O3: above the bound of O1, below 1e-4."""
    model, x = three_by_three(), torch.randn(1, 64, 56, 56)
    compiled = compile_at("O3", model)
    with torch.no_grad():
        got, reference = compiled(x), copy.deepcopy(model).double()(x.double())
    assert by_nnpack(compiled) == [1]
    error = (got - reference).abs().max() / reference.abs().max()
    assert 1e-6 < error < 1e-4


# --- NNPACK's own threads -------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [1, 2])
def test_not_with_several_threads(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(nnpack, "_pool", (os.getpid(), pool))
    model, x = wide(5), image()
    compiled = compile_at("O1", model)
    hold(compiled, model, x, "two threads")
    assert by_nnpack(compiled) == []


def test_a_thread_count_that_was_set_since_goes_the_direct_way() -> None:
    model, x = wide(5), image()
    compiled = compile_at("O1", model)
    hold(compiled, model, x, "one thread")
    torch.set_num_threads(2)
    hold(compiled, model, x, "two threads")
    assert by_nnpack(compiled) == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    model, x = wide(5), image()
    compiled = compile_at("O1", model)
    before = hold(compiled, model, x, "parent")
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        with torch.no_grad():
            same = torch.allclose(compiled(x), before, atol=1e-4)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- probe and estimate ---------------------------------------------------------------------------


def test_absent_where_its_threads_stayed_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnpack, "_pool", (os.getpid() + 1, 1))
    assert "fork" in nnpack.probe().reason


def test_absent_where_torch_has_no_nnpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.nnpack, "is_available", lambda: False)
    assert "without NNPACK" in nnpack.probe().reason


@pytest.mark.parametrize(
    ("shape", "kernel", "measured"),
    [
        ((64, 64, 56), (3, 3), 1.7),
        ((64, 64, 56), (5, 5), 3.2),
        ((32, 32, 56), (9, 9), 4.3),
        ((48, 64, 28), (5, 5), 1.2),
        ((192, 192, 17), (1, 7), 0.5),
        ((256, 256, 14), (3, 3), 0.65),
        ((3, 64, 224), (9, 9), 1.25),
    ],
)
def test_the_estimate_is_near_what_was_measured(
    shape: tuple[int, int, int], kernel: tuple[int, int], measured: float
) -> None:
    inputs, outputs, side = shape
    assert 0.5 < nnpack.gain(inputs, outputs, (side, side), kernel) / measured < 1.5


def test_the_estimate_of_nothing() -> None:
    assert nnpack.gain(0, 0, (8, 8), (5, 5)) == 0.0
    assert nnpack.gain(0, 4, (0, 8), (5, 5)) == 0.0
