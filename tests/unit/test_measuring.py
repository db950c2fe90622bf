"""Measuring a profile: turns, budget and reasons with made-up candidates, and once for real."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowering import candidates, measuring, toolchain
from lowering.candidates import CANDIDATES
from lowering.contract import Probe
from lowering.profile import SHAPES, MachineProfile, RateKey, from_text

pytestmark = pytest.mark.quick


def of_torch() -> dict[RateKey, candidates.Prepare]:
    """Those that need no compiler; the kernels of our own have their own tests."""
    return {key: prepare for key, prepare in CANDIDATES.items() if key.provider != "openmp"}


class Machine:
    """A clock that only candidates move, and a record of who was called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def takes(self, seconds: float, name: str = "") -> Callable[[Any], Callable[[], None]]:
        def run() -> None:
            self.now += seconds
            self.calls.append(name)

        return lambda problem: run

    def measure(self, table: dict[RateKey, Any], budget: float = 0.5) -> MachineProfile:
        return measuring.measure(budget, table, self.clock)


def key(provider: str, shape: str = "vector", dtype: str = "float32", kind: str = "gemm") -> Any:
    return RateKey(kind, provider, dtype, shape)


def test_rates_are_those_of_the_clock_and_candidates_take_turns() -> None:
    here = Machine()
    table = {key("a"): here.takes(0.001, "a"), key("b"): here.takes(0.002, "b")}
    profile = here.measure(table)
    flops = candidates.problem("gemm", "float32", "vector", 1).flops
    assert profile.rates[key("a")] == pytest.approx(flops / 1e6)
    assert profile.rates[key("b")] == pytest.approx(flops / 2e6)
    assert profile.faster("gemm", "float32", "vector") == ["a", "b"]
    assert here.calls[:6] == ["a", "b", "a", "b", "b", "a"]  # warm-up, then each round turned
    assert len(here.calls) == 2 + 2 * 15


def test_a_slow_candidate_is_called_once_and_the_others_go_on() -> None:
    here = Machine()
    table = {key("fast"): here.takes(0.001, "fast"), key("slow"): here.takes(0.2, "slow")}
    profile = here.measure(table)
    assert here.calls.count("slow") == 1
    assert here.calls.count("fast") > 3
    assert set(profile.rates) == set(table)
    assert any("slow" in note and "one call only" in note for note in profile.notes)


def test_what_would_be_slow_is_not_tried() -> None:
    """The product with 8 rows takes 8 times as long as that with one, and so on."""
    here = Machine()
    flops = {s: candidates.problem("gemm", "float32", s, 1).flops for s in SHAPES["gemm"]}
    table = {key("slow", s): here.takes(0.01 * n / flops["vector"]) for s, n in flops.items()}
    profile = here.measure(table, budget=2.0)
    assert key("slow", "small") in profile.rates
    assert key("slow", "large") not in profile.rates
    assert any("left out, one call would take 1.3 s" in note for note in profile.notes)


def test_the_budget_ends_it() -> None:
    here = Machine()
    table = {key("a", dtype=dtype): here.takes(0.4) for dtype in ("float32", "bfloat16", "float16")}
    profile = here.measure(table, budget=0.5)
    assert set(profile.rates) == {key("a"), key("a", dtype="bfloat16")}
    assert "gemm float16 vector: not measured, the budget was spent" in profile.notes
    assert profile.seconds == pytest.approx(0.8)


@pytest.mark.parametrize("give_up", [False, True])
def test_a_disturbed_measurement_may_be_given_up(
    monkeypatch: pytest.MonkeyPatch, give_up: bool
) -> None:
    """The clock of these candidates moves while their thread does not run: all time is lost."""
    monkeypatch.setattr(measuring, "_scheduled", lambda: None)
    here = Machine()
    table = {key("a", dtype=dtype): here.takes(0.01) for dtype in ("float32", "bfloat16")}
    profile = measuring.measure(0.5, table, here.clock, give_up)
    assert profile.disturbed
    assert len(profile.rates) == (1 if give_up else 2)
    assert ("given up: other processes are busy" in profile.notes) == give_up


def test_the_scheduler_tells_how_busy_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(1000, 500), *[(4000, 1500)] * 10])
    monkeypatch.setattr(measuring, "_scheduled", lambda: next(told))
    assert Machine().measure({}).busy == 0.25


def test_a_group_gets_its_share_of_what_is_left() -> None:
    here, dtypes = Machine(), ("float32", "bfloat16", "float16")
    table = {key("a", dtype=dtype): here.takes(0.02, dtype) for dtype in dtypes}
    here.measure(table, budget=0.6)
    assert {here.calls.count(dtype) for dtype in dtypes} <= {9, 10, 11, 12}


def test_who_cannot_is_left_out_with_the_reason() -> None:
    def broken(problem: Any) -> Any:
        raise RuntimeError("no such instruction\nand a long trace")

    here = Machine()
    table = {key("a"): here.takes(0.001), key("absent"): lambda problem: None, key("b"): broken}
    profile = here.measure(table)
    assert set(profile.rates) == {key("a")}
    assert "gemm float32 by absent: not here" in profile.notes
    assert "gemm float32 by b: RuntimeError: no such instruction" in profile.notes


def test_a_dtype_that_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(candidates, "problem", broken)
    profile = Machine().measure({key("a"): lambda problem: None})
    assert "gemm float32 vector: RuntimeError: out of memory" in profile.notes


def test_float32_products_come_first() -> None:
    table = {one: lambda problem: None for one in CANDIDATES}
    first = sorted(table, key=measuring._order)[0]
    assert (first.kind, first.dtype, first.shape) == ("gemm", "float32", "vector")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("provider", sorted({key.provider for key in of_torch()}))
def test_candidates_compute_the_same(kind: str, provider: str) -> None:
    for shape in SHAPES[kind]:
        prepare = CANDIDATES.get(RateKey(kind, provider, "float32", shape))
        problem = candidates.problem(kind, "float32", shape, torch.get_num_threads())
        try:
            run = prepare(problem) if prepare is not None else None
            found = run() if run is not None else None
        except RuntimeError:  # not on this CPU, as NNPACK says it
            continue
        if found is not None:
            expected = CANDIDATES[RateKey(kind, "eager", "float32", shape)](problem)
            assert expected is not None
            torch.testing.assert_close(found, expected(), rtol=1e-4, atol=1e-2)


def test_a_new_version_of_a_candidate_changes_the_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "CANDIDATES", {})
    monkeypatch.setattr(candidates, "_versions", {})
    seen = set()
    for version in ("1", "2"):
        told = functools.partial(str, version)
        candidates.register("gemm", "ours", ["float32"], lambda p: None, version=told)
        seen.add(measuring.conditions(2).fingerprint())
    assert len(seen) == 2
    assert len(candidates.CANDIDATES) == len(SHAPES["gemm"])


def test_a_compiler_that_comes_or_goes_changes_the_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    for found in (Probe.yes("g++ 1"), Probe.no("no compiler")):
        monkeypatch.setattr(toolchain, "probe", lambda found=found: found)
        candidates._kernels_version.cache_clear()
        seen.add(measuring.conditions(2).candidates)
    candidates._kernels_version.cache_clear()
    assert len(seen) == 2


def test_what_takes_long_happens_before_the_clock_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(candidates, "CANDIDATES", {})
    monkeypatch.setattr(candidates, "_ready", {})
    built: list[Path] = []
    for kind in SHAPES:
        candidates.register(kind, "ours", ["float32"], lambda p: None, ready=built.append)
    candidates.get_ready(tmp_path)
    assert set(built) == {tmp_path}


def test_this_machine_for_real() -> None:
    """What holds whatever the times are: a whole record that survives its file."""
    state = torch.get_rng_state()
    profile = measuring.measure(0.3, of_torch())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert profile.rates
    assert all(rate > 0 for rate in profile.rates.values())
    assert profile.call_us > 0
    assert profile.conditions == measuring.conditions()
    assert profile.faster("gemm", "float32", "vector")
    assert from_text(json.dumps(profile.as_dict())) == (profile, "")
    assert 0 <= measuring.glance() <= 1


def test_the_stopwatch_takes_the_best_and_waits_for_the_device() -> None:
    here, order = Machine(), list[str]()
    run = here.takes(0.5)(None)
    assert measuring.best_seconds(run, lambda: order.append("wait"), here.clock) == 0.5
    assert len(order) == len(here.calls)

    def broken() -> None:
        raise NotImplementedError

    assert measuring.best_seconds(broken) is None
    assert measuring.best_rate(8, run, clock=here.clock) == 16
    assert measuring.best_rate(8, broken) == 0
    assert measuring.best_rate(1 << 20, measuring.buffer(1 << 20).sum) > 0
