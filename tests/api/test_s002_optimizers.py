"""S002-34 to 37: an optimizer says what it did, and only what the report proves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import UnifiedWarning, calibration
from kernel_dispatch.backends import (
    CPUOptimizer,
    MPSOptimizer,
    OptimizationLevel,
    OptimizationResult,
    OptimizationStrategy,
    get_optimizer,
)
from lowering import measuring, targets, toolchain
from lowering.errors import BackendNotAvailableError, SettingError
from lowering.profile import MachineProfile, RateKey
from tests.api.vendors import HERE, Net, machine_with
from tests.support.compiling import every_row_applies


@pytest.fixture
def library_calls() -> Iterator[None]:
    with every_row_applies():
        yield


def entries(model: nn.Module) -> list[str]:
    """The report's own list, read by a reader of JSON."""
    told = json.loads(kernel_dispatch.report(model).json())
    return [
        f"{entry['region']}:{entry['provider']}"
        for graph in told["graphs"]
        for entry in graph["regions"]
        if entry["provider"] != "eager"
    ]


@pytest.mark.quick
def test_s002_34_get_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_optimizer()` is that of the best backend here, `get_optimizer(name)` that vendor's."""
    machine_with(monkeypatch, "mps")
    assert type(get_optimizer()) is MPSOptimizer
    assert type(get_optimizer("cpu")) is CPUOptimizer
    with pytest.raises(SettingError, match="unknown backend 'cpux'"):
        get_optimizer("cpux")


@pytest.mark.usefixtures("library_calls")
def test_s002_35_optimize() -> None:
    """`optimize(model, level, sample_input)` gives the compiled model and a result that holds it.
    Where the model raises, `success` is False, the error is among the warnings, and the model is
    the caller's own; where the device is absent, it raises."""
    model, x = Net(16).eval(), torch.randn(4, 16)
    optimized, result = get_optimizer("cpu").optimize(model, "O1", x)
    assert result.success
    assert result.model is optimized
    assert type(optimized) is Net
    assert result.level is OptimizationLevel.O1
    assert result.warnings == []
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1.3e-6, atol=1e-5)
    (graph,) = kernel_dispatch.report(optimized)  # the sample's, for inference as the model is
    assert graph.runs == 2


def test_s002_35_failure() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such row")

    model = Raises()
    got, result = get_optimizer("cpu").optimize(model, "O1", torch.ones(2))
    assert (result.success, result.optimizations_applied) == (False, [])
    assert got is result.model is model
    (told,) = result.warnings
    assert "ValueError: no such row" in told
    linear = nn.Linear(3, 3)
    got, result = get_optimizer("cpu").optimize(linear, "O1", torch.ones(2, 4))
    assert not result.success
    assert torch.equal(got(torch.ones(1, 3)), linear(torch.ones(1, 3)))


@pytest.mark.quick
def test_s002_35_without_a_sample_or_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch)
    model, result = get_optimizer().optimize(nn.Linear(2, 2))
    assert result.success
    assert result.model is model
    assert result.level is OptimizationLevel.O2
    assert result.optimizations_applied == []
    assert result.warnings[0].startswith("nothing was compiled yet: no sample_input")
    with pytest.raises(BackendNotAvailableError):
        get_optimizer("nvidia").optimize(nn.Linear(2, 2), "O1", torch.ones(1, 2))


def test_s002_35_a_sample_leaves_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    optimized, result = get_optimizer("cpu").optimize(model, "O0", torch.randn(8, 4))
    torch.randn(8, 4)
    assert result.success
    assert torch.equal(torch.get_rng_state(), _after(state))
    for name, value in optimized.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.training
    assert torch.is_grad_enabled()


def _after(state: torch.Tensor) -> torch.Tensor:
    """Where the generator is when both calls of randn above have drawn, and nobody else."""
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(2):
        torch.randn(8, 4, generator=generator)
    return generator.get_state()


class _Mixed(nn.Module):
    """A graph break between two graphs of several kinds of region."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        torch._dynamo.graph_break()
        return self.head(x)


@pytest.mark.usefixtures("library_calls")
def test_s002_36_the_list_is_the_reports() -> None:
    """`optimizations_applied` is "region:provider" for each entry of the report's region lists that
    somebody else than eager computed, entry for entry and nothing else; warnings are its fallbacks,
    metrics what was counted and measured. `to_dict()` is JSON."""
    options: Any = {"level": "O1", "sample_input": torch.randn(2, 3, 8, 8)}
    model, result = get_optimizer("cpu").optimize(_Mixed().eval(), **options)
    assert result.optimizations_applied == entries(model)
    assert len(result.optimizations_applied) == 2
    assert {name.partition(":")[0] for name in result.optimizations_applied} == {
        "convolution",
        "linear",
    }
    graphs = kernel_dispatch.report(model)
    assert result.metrics["graphs"] == len(graphs) == 2
    assert result.metrics["graph_breaks"] == 1
    assert result.metrics["runs"] == 2
    assert result.metrics["packed_bytes"] == sum(
        part.packed_bytes for graph in graphs for part in graph.regions
    )
    assert result.metrics["compile_seconds"] > 0
    told = json.loads(json.dumps(result.to_dict()))
    assert told["model"] == "_Mixed"
    assert told["level"] == "O1"
    assert list(told) == list(OptimizationResult.__dataclass_fields__)


@pytest.mark.usefixtures("library_calls")
def test_s002_36_at_o2() -> None:
    model, x = Net(64).eval(), torch.randn(64, 64)
    optimized, result = get_optimizer("cpu").optimize(model, level="O2", sample_input=x)
    assert result.optimizations_applied == entries(optimized)
    assert result.optimizations_applied[0] == "graph:inductor"
    assert len(result.optimizations_applied) == 2
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)
    (graph,) = kernel_dispatch.report(optimized)
    assert graph.runs == 2


@pytest.mark.usefixtures("library_calls")
def test_s002_36_o0_applies_nothing() -> None:
    model, result = get_optimizer("cpu").optimize(Net(16), "none", torch.randn(4, 16))
    assert result.success
    assert result.optimizations_applied == [] == entries(model)
    assert result.metrics["graphs"] == 1


@pytest.mark.usefixtures("library_calls")
def test_s002_36_what_fell_back_is_a_warning_and_was_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(compile_fx, "compile_fx", broken)
    model, x = Net(16).eval(), torch.randn(4, 16)
    with pytest.warns(UnifiedWarning, match="injected"):
        optimized, result = get_optimizer("cpu").optimize(model, "O2", x)
    assert result.success
    assert not any("inductor" in name for name in result.optimizations_applied)
    assert result.optimizations_applied == entries(optimized)
    (told,) = result.warnings
    assert told.startswith("compile: inductor fell back to eager: compile-failed: injected")


@pytest.mark.usefixtures("library_calls")
def test_s002_36_what_failed_when_it_ran_was_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regions that were lowered and never answered are no optimisations."""
    from kernel_dispatch import pipeline
    from lowering.contract import Compiled, Region

    def breaks(gm: Any, inputs: Any, record: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("broken kernel")

        return "inductor", Compiled(run=run, regions=[Region("linear", "openmp", 2)])

    monkeypatch.setattr(pipeline, "_compile", breaks)
    with pytest.warns(UnifiedWarning, match="broken kernel"):
        _, result = get_optimizer("cpu").optimize(Net(16).eval(), "O2", torch.randn(4, 16))
    assert result.success
    assert result.optimizations_applied == []
    assert "broken kernel" in result.warnings[0]


# --- strategies -----------------------------------------------------------------------------------


def test_s002_37_strategies_are_the_compilers_own_rows(library_calls: None) -> None:
    """`get_available_strategies()` comes from the table that the compiler chooses by: each name can
    show up in `optimizations_applied` at its levels; `speedup_estimate` is measured on this
    machine, or None."""
    optimizer = get_optimizer("cpu")
    strategies = {one.name: one for one in optimizer.get_available_strategies()}
    rows = {f"{row.region}:{row.provider}" for row in targets.find("cpu").rows}  # type: ignore[union-attr]
    assert set(strategies) <= rows
    assert not any(name.endswith(":eager") for name in strategies)
    assert {"linear:mkldnn", "convolution:mkldnn"} <= set(strategies)
    o1 = {name for name, one in strategies.items() if OptimizationLevel.O1 in one.applicable_levels}
    sample = torch.randn(2, 3, 8, 8)
    _, result = optimizer.optimize(_Mixed().eval(), "O1", sample)
    assert result.optimizations_applied
    assert set(result.optimizations_applied) <= o1
    for one in strategies.values():
        assert isinstance(one, OptimizationStrategy)
        assert one.description
        assert list(one.applicable_levels) == sorted(one.applicable_levels)
        assert one.speedup_estimate is None  # no profile is stored for the tests


@pytest.mark.quick
def test_s002_37_estimates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(provider: str, shape: str) -> RateKey:
        return RateKey("gemm", provider, "float32", shape)

    rates = {
        rate("eager", "small"): 10.0,
        rate("openmp", "small"): 20.0,
        rate("eager", "large"): 10.0,
        rate("openmp", "large"): 80.0,
        rate("mkldnn", "vector"): 5.0,  # eager was not measured there
    }
    profile = MachineProfile(measuring.conditions(None), rates)
    monkeypatch.setattr(calibration, "current", lambda *_, **__: profile)
    with every_row_applies():
        told = {one.name: one for one in get_optimizer("cpu").get_available_strategies()}
    assert told["linear:mkldnn"].speedup_estimate is None
    assert told["convolution:mkldnn"].speedup_estimate is None
    if "linear:openmp" in told:  # where a C++ compiler works
        assert told["linear:openmp"].speedup_estimate == pytest.approx(4.0)


@pytest.mark.quick
@pytest.mark.parametrize("vendor", [*HERE, "cpu"])
def test_s002_37_every_vendor_has_strategies(vendor: str) -> None:
    """Also where its device is absent: then all that could be."""
    strategies = get_optimizer(vendor).get_available_strategies()
    names = [one.name for one in strategies]
    assert names
    assert len(names) == len(set(names))
    if vendor != "tpu" and (vendor != "cpu" or toolchain.probe().available):
        assert "graph:inductor" in names
    assert all(one.speedup_estimate is None for one in strategies)
