"""Plans for Intel GPUs, with probes that were made up: no Intel GPU has run this code."""

from __future__ import annotations

import pytest

from lowering.capability import Situation, Work, check
from lowering.levels import Level
from lowering.targets import xpu
from tests.unit.test_selection import facts, machine, plan, rejected, settings

pytestmark = pytest.mark.quick

CLIENT = machine("xpu", "cpu", xpu={"device_count": 1, "features": []})
MAX = machine("xpu", "cpu", xpu={"device_count": 2, "features": ["fp64"]})


@pytest.mark.parametrize(
    ("level", "providers"),
    [("O0", ("eager",)), ("O1", ("eager",)), ("O2", ("inductor", "eager"))],
)
def test_tensors_on_an_intel_gpu_stay_there(level: str, providers: tuple[str, ...]) -> None:
    found = plan(facts(["xpu"]), settings(level=level), CLIENT)
    assert (found.target, found.providers, found.move_to) == ("xpu", providers, None)
    assert rejected(found, "cpu") == ["tensors-elsewhere"]


def test_tensors_on_the_cpu_stay_there_too() -> None:
    assert plan(facts(), settings(), CLIENT).target == "cpu"
    assert plan(facts(), settings(device="xpu"), CLIENT).move_to == "xpu"
    assert plan(facts(), settings(device="xpu:1"), MAX).move_to == "xpu:1"


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_float64_needs_a_gpu_that_has_it(dtype: str) -> None:
    graph = facts(["xpu"], dtypes=("float32", dtype))
    assert plan(graph, settings(), MAX).providers == ("inductor", "eager")
    refused = plan(graph, settings(), CLIENT)
    assert rejected(refused, "xpu", "inductor") == ["dtype-unsupported"]
    assert rejected(refused, "xpu", "eager") == ["dtype-unsupported"]
    assert rejected(refused, "xpu")[-1] == "no-target"


def test_a_forced_client_gpu_leaves_float64_on_the_cpu() -> None:
    found = plan(facts(dtypes=("float64",)), settings(device="xpu"), CLIENT)
    assert (found.target, found.move_to) == ("cpu", None)
    assert [reason.code for reason in found.refused_wish] == ["dtype-unsupported"] * 2


def test_without_triton_for_xpu_it_runs_op_by_op() -> None:
    here = machine("xpu", "cpu", xpu={"features": []}, absent={"triton": "another flavour"})
    found = plan(facts(["xpu"]), settings(), here)
    assert found.providers == ("eager",)
    assert "another flavour" in found.missing[0].text


def test_a_dtype_may_need_a_feature() -> None:
    """The rule itself, apart from any target that is shipped."""
    row, _ = xpu.TARGET.rows
    work = Work(dtypes=frozenset({"float64"}), op_count=10)
    (no,) = check(row, work, Situation(Level.O2))
    assert "float64" in no.text
    assert check(row, work, Situation(Level.O2, features=frozenset({"fp64"}))) == ()
    single = Work(dtypes=frozenset({"float32"}), op_count=10)
    assert check(row, single, Situation(Level.O2)) == ()


def test_both_sorts_of_gpu_can_be_named_in_a_dry_run() -> None:
    assert list(xpu.TARGET.on_paper) == ["client", "max"]


def test_o3_lets_inductor_time_its_alternatives() -> None:
    assert xpu.inductor_config(Level.O3) == {"max_autotune": True}
    assert xpu.inductor_config(Level.O2) == {}
