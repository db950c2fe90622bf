"""Linear layers through MKL's packed product: numbers, report, fresh weights, and when it is not
used. The row is for Intel; on other machines the vendor is injected, so that the same code runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import devices
from lowering import packing
from lowering.native import library
from lowering.providers import mkl
from lowering.targets.cpu import TARGET
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract
from tests.support.regions import kernels
from tests.support.reports import assert_ran_as_planned

if not mkl.probe().available:
    pytest.skip(mkl.probe().reason, allow_module_level=True)

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
OTHERS = ["openmp", "mkldnn"]
ROWS = 64


@pytest.fixture(autouse=True, params=["python", "native"])
def intel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator in Python, and the one in C++ where our kernels are built."""
    native = request.param == "native"
    if native:
        kernels()
    monkeypatch.setattr(library, "is_loaded", lambda: native)
    real = devices.probe

    def probe(target: Any) -> Any:
        found = real(target)
        if target is not TARGET:
            return found
        features = sorted({*found.details["features"], "intel"} - {"amd"})
        return replace(found, details={**found.details, "features": features})

    monkeypatch.setattr(devices, "probe", probe)
    yield
    packing.forget()


def packed_so_far() -> int:
    return mkl.weights.packed + library.packed_count()


def layers(bias: bool = True) -> nn.Module:
    sizes = ((256, 512), (512, 256))
    parts = [part for a, b in sizes for part in (nn.Linear(a, b, bias=bias), nn.GELU())]
    return nn.Sequential(*parts).eval()


def compiled_at(level: str, model: nn.Module, **options: Any) -> Any:
    return compile_at(level, model, options={"disable": OTHERS, **options})


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


@pytest.mark.sampled(2)
@LEVELS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS // 2)], ids=["2d", "3d"])
def test_numbers_and_report(level: str, bias: bool, shape: tuple[int, ...]) -> None:
    model, x = layers(bias), torch.randn(*shape, 256)
    compiled = compiled_at(level, model)
    for call in range(3):
        hold(compiled, model, x, f"call {call}")
    assert_ran_as_planned(compiled, level)
    assert regions(compiled) == [("linear", "mkl", 2, 6)]


def test_graphs_of_one_operator_are_no_graphs_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One out of torch's cache would ask for an operator that another process may not have."""
    model, x = layers(), torch.randn(ROWS, 256)
    for native in (True, False):
        if native and not library.probe().available:
            continue
        monkeypatch.setattr(library, "is_loaded", lambda native=native: native)
        torch._dynamo.reset()
        before = library.packed_count(), mkl.weights.packed
        hold(compiled_at("O2", model), model, x, f"native: {native}")
        after = library.packed_count(), mkl.weights.packed
        assert (after[0] - before[0], after[1] - before[1]) == ((2, 0) if native else (0, 2))
        packing.forget()


@LEVELS
@pytest.mark.parametrize("rows", [4, 5, 48, 49])
def test_the_contract_from_four_rows_on(level: str, rows: int) -> None:
    """Where MKL switches between its kernels, and with the sums that are long."""
    model, x = nn.Sequential(nn.Linear(4096, 256)).eval(), torch.randn(rows, 4096)
    compiled = compiled_at(level, model)
    hold(compiled, model, x, f"{rows} rows")
    assert regions(compiled) == [("linear", "mkl", 1, 1)]


@LEVELS
def test_strided_inputs_and_weights(level: str) -> None:
    model, x = layers(), torch.randn(256, ROWS).t()
    with torch.no_grad():
        model[0].weight = nn.Parameter(torch.randn(256, 512).t() / 16)
    compiled = compiled_at(level, model)
    hold(compiled, model, x, "transposed")
    assert regions(compiled) == [("linear", "mkl", 2, 2)]


@LEVELS
def test_weights_stored_the_other_way_round(level: str) -> None:
    """As GPT-2 stores them; a square one may serve both ways, and a change shows in both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(256, 512) / 16)
            self.square = nn.Parameter(torch.randn(256, 256) / 16)
            self.bias = nn.Parameter(torch.randn(512))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            both = x @ self.square, nn.functional.linear(x, self.square)
            return (torch.addmm(self.bias, x, self.wide), *both)

    model, x = Both().eval(), torch.randn(ROWS, 256)
    compiled = compiled_at(level, model)
    for call in range(2):
        with torch.no_grad():
            got, eager = compiled(x), model(x)
            reference = copy.deepcopy(model).double()(x.double())
            assert_contract(list(got), list(eager), list(reference), f"call {call}")
            model.square.mul_(2)
            model.wide.add_(1)
    assert regions(compiled) == [("linear", "mkl", 3, 6)]


@LEVELS
def test_packed_once_and_fresh(level: str) -> None:
    model, x = layers(), torch.randn(ROWS, 256)
    compiled = compiled_at(level, model)
    packed = packed_so_far()
    before = hold(compiled, model, x, "before")
    hold(compiled, model, x, "again")
    assert packed_so_far() == packed + 2

    def written_through_data() -> None:
        model[0].weight.data.mul_(3)

    def stepped() -> None:
        with torch.no_grad():
            model[0].weight.add_(0.5)

    def other_data() -> None:
        model[2].weight.data = torch.randn_like(model[2].weight)

    def loaded() -> None:
        model.load_state_dict({k: v * 2 + 1 for k, v in model.state_dict().items()})

    for change in (written_through_data, stepped, other_data, loaded):
        change()
        after = hold(compiled, model, x, change.__name__)
        assert not torch.equal(before, after), change.__name__
        before = after


@LEVELS
def test_one_packed_form_for_each_number_of_rows(level: str) -> None:
    model = layers()
    compiled = compiled_at(level, model)
    packed = packed_so_far()
    for rows in (ROWS, ROWS * 2, ROWS):
        torch._dynamo.config.automatic_dynamic_shapes = False
        try:
            hold(compiled, model, torch.randn(rows, 256), f"{rows} rows")
        finally:
            torch._dynamo.config.automatic_dynamic_shapes = True
    assert packed_so_far() == packed + 4


@LEVELS
@pytest.mark.parametrize(
    ("what", "dynamic", "shape"),
    [("changing rows", True, (ROWS, 256)), ("few rows", False, (3, 256))],
)
def test_layers_that_are_left_alone(
    level: str, what: str, dynamic: bool, shape: tuple[int, ...]
) -> None:
    model, x = nn.Sequential(nn.Linear(256, 8192)).eval(), torch.randn(*shape)
    compiled = compile_at(level, model, dynamic=dynamic, options={"disable": OTHERS})
    hold(compiled, model, x, what)
    assert regions(compiled) == []


@LEVELS
def test_disabled_and_other_dtypes(level: str) -> None:
    model, x = layers(), torch.randn(ROWS, 256)
    without = compiled_at(level, model, disable=[*OTHERS, "mkl"])
    hold(without, model, x, "disabled")
    assert regions(without) == []
    wide = compiled_at(level, model.double())
    with torch.no_grad():
        torch.testing.assert_close(wide(x.double()), model(x.double()))
    assert regions(wide) == []


@LEVELS
def test_an_empty_batch(level: str) -> None:
    """The operator itself: a graph with an empty batch has too few FLOPs for the row."""
    weight, bias = torch.randn(8, 0), torch.randn(8)
    linear = mkl._operator()
    torch.testing.assert_close(linear(torch.randn(4, 0), weight, bias), bias.expand(4, 8))
    assert linear(torch.randn(0, 8), torch.randn(5, 8), None).shape == (0, 5)
    assert linear(torch.randn(0, 8), torch.randn(8, 5), None, True).shape == (0, 5)


def test_absent_where_torch_has_no_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert "without MKL" in mkl.probe().reason


def test_not_by_expectation_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed MKL is not faster there, so that it needs a measurement that says so."""
    monkeypatch.undo()
    if "intel" in devices.probe(TARGET).details["features"]:
        pytest.skip("an Intel machine")
    model, x = layers(), torch.randn(ROWS, 256)
    compiled = compiled_at("O1", model)
    hold(compiled, model, x, "not measured")
    assert regions(compiled) == []
    (graph,) = kernel_dispatch.report(compiled)
    assert [row for row in graph.plan.region_rows if row.provider == "mkl"]
