"""What is chosen on the machines that users have, as tables: read them as documentation.

The machines are in `machines.py`, as what their probes would say. A cell is target/provider. The
last test goes through every combination and holds that nothing is chosen silently.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_dispatch.selection import Plan, plan
from kernel_dispatch.settings import Settings, resolve
from lowering import targets
from lowering.capability import GRAPH
from lowering.errors import BackendNotAvailableError
from tests.unit.machines import GRAPHS, MACHINES, graph

pytestmark = pytest.mark.quick

LEVELS = ("O0", "O1", "O2", "O3")

# Which machine, where the tensors are -> who computes an inference graph at each level.
BY_LEVEL = """
CPU only         cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
no compiler      cpu     cpu/eager     cpu/eager      cpu/eager      cpu/eager
H100             cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
H100             cuda    cuda/eager    cuda/eager     cuda/inductor  cuda/inductor
H100             both    cuda/eager    cuda/eager     cuda/inductor  cuda/inductor
two A100         cuda    cuda/eager    cuda/eager     cuda/inductor  cuda/inductor
no Triton        cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
no Triton        cuda    cuda/eager    cuda/eager     cuda/eager     cuda/eager
MI300X           cuda    rocm/eager    rocm/eager     rocm/inductor  rocm/inductor
XPU laptop       cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
XPU laptop       xpu     xpu/eager     xpu/eager      xpu/inductor   xpu/inductor
XPU server       xpu     xpu/eager     xpu/eager      xpu/inductor   xpu/inductor
Mac              cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
Mac              mps     mps/eager     mps/eager      mps/inductor   mps/inductor
TPU, torch_tpu   cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
TPU, torch_tpu   tpu     xla/eager     xla/torch_tpu  xla/torch_tpu  xla/torch_tpu
TPU, torch_xla   xla     xla/eager     xla/torch_xla  xla/torch_xla  xla/torch_xla
PJRT on a CPU    cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
inf2, traced     cpu     cpu/eager     cpu/eager      cpu/inductor   cpu/inductor
trn2, native     neuron  neuron/eager  neuron/nki     neuron/nki     neuron/nki
"""

# Which machine, where the tensors are -> who computes which kind of graph at O2; the tensors stay.
KINDS = ("inference", "training", "dynamic", "small", "float64", "complex64", "int64")
BY_KIND = """
CPU only         cpu     inductor   inductor   inductor   eager      inductor   inductor   inductor
no compiler      cpu     eager      eager      eager      eager      eager      eager      eager
H100             cuda    inductor   inductor   inductor   inductor   inductor   inductor   inductor
no Triton        cuda    eager      eager      eager      eager      eager      eager      eager
MI300X           cuda    inductor   inductor   inductor   inductor   inductor   inductor   inductor
XPU laptop       xpu     inductor   inductor   inductor   inductor   eager      inductor   inductor
XPU server       xpu     inductor   inductor   inductor   inductor   inductor   inductor   inductor
Mac              mps     inductor   inductor   inductor   inductor   eager      eager      inductor
TPU, torch_tpu   tpu     torch_tpu  torch_tpu  torch_tpu  torch_tpu  eager      torch_tpu  torch_tpu
TPU, torch_xla   xla     torch_xla  torch_xla  torch_xla  torch_xla  eager      torch_xla  torch_xla
PJRT on a CPU    xla     torch_xla  torch_xla  torch_xla  torch_xla  torch_xla  torch_xla  torch_xla
trn2, native     neuron  nki        eager      eager      nki        eager      eager      nki
"""

# UNIFIED_DEVICE, and tensors on the CPU: they move ("->"), or the wish is refused for a reason and
# the graph stays.
FORCED = """
H100             cuda    inference  cuda/inductor -> cuda
H100             nvidia  inference  cuda/inductor -> cuda
H100             cuda:0  inference  cuda/inductor -> cuda:0
H100             cpu     inference  cpu/inductor
H100             cuda    training   cpu/inductor, placement-refused
H100             cuda    writing    cpu/inductor, placement-refused
two A100         cuda:1  inference  cuda/inductor -> cuda:1
no Triton        cuda    inference  cuda/eager -> cuda
no Triton        cuda    training   cpu/inductor, placement-refused
MI300X           amd     inference  rocm/inductor -> cuda
MI300X           rocm    training   cpu/inductor, placement-refused
XPU laptop       xpu     inference  xpu/inductor -> xpu
XPU laptop       xpu     float64    cpu/inductor, dtype-unsupported
XPU server       xpu     float64    xpu/inductor -> xpu
Mac              mps     inference  mps/inductor -> mps
Mac              metal   inference  mps/inductor -> mps
Mac              mps     float64    cpu/inductor, dtype-unsupported
Mac              mps     complex64  cpu/inductor, dtype-unsupported
TPU, torch_tpu   tpu     inference  xla/torch_tpu -> tpu
TPU, torch_tpu   xla     training   xla/torch_tpu -> tpu
TPU, torch_xla   tpu     dynamic    xla/torch_xla -> xla
TPU, torch_xla   tpu     writing    xla/torch_xla -> xla
PJRT on a CPU    xla     float64    xla/torch_xla -> xla
inf2, traced     neuron  inference  neuron/nki -> neuron
inf2, traced     neuron  int64      neuron/nki -> neuron
inf2, traced     neuron  training   cpu/inductor, training-unsupported
inf2, traced     neuron  dynamic    cpu/inductor, dynamic-unsupported
inf2, traced     neuron  float64    cpu/inductor, dtype-unsupported
trn2, native     neuron  inference  neuron/nki -> neuron
trn2, native     neuron  training   cpu/inductor, training-unsupported
trn2, native     neuron  dynamic    neuron/eager -> neuron
trn2, native     neuron  complex64  cpu/inductor, dtype-unsupported
"""


def rows(table: str) -> list[list[str]]:
    """Cells are apart by two spaces or more."""
    lines = table.strip().splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def settings(**options: str) -> Settings:
    """Levels and devices as the environment gives them."""
    return resolve(None, None, {f"UNIFIED_{name.upper()}": one for name, one in options.items()})


def planned(machine: str, kind: str, where: str, **options: str) -> Plan:
    devices = ("cpu", accelerator(machine)) if where == "both" else (where,)
    return plan(graph(kind, devices), settings(**options), MACHINES[machine].machine())


def accelerator(machine: str) -> str:
    """What torch calls the device beside the CPU; "cpu" where there is none."""
    name = next(iter(MACHINES[machine].here))
    target = targets.find(name)
    assert target is not None
    return str(MACHINES[machine].here[name].get("device", target.device_types[0]))


@pytest.mark.parametrize(("machine", "where", "cells"), [(m, w, c) for m, w, *c in rows(BY_LEVEL)])
def test_by_level(machine: str, where: str, cells: list[str]) -> None:
    found = [planned(machine, "inference", where, level=level) for level in LEVELS]
    assert [f"{one.target}/{one.provider}" for one in found] == cells
    assert not any(one.move_to or one.refused_wish for one in found)


@pytest.mark.parametrize(("machine", "where", "cells"), [(m, w, c) for m, w, *c in rows(BY_KIND)])
def test_by_kind(machine: str, where: str, cells: list[str]) -> None:
    found = [planned(machine, kind, where) for kind in KINDS]
    assert [one.provider for one in found] == cells
    assert not any(one.move_to or one.refused_wish for one in found)


@pytest.mark.parametrize(("machine", "device", "kind", "cell"), rows(FORCED))
def test_forced(machine: str, device: str, kind: str, cell: str) -> None:
    found = planned(machine, kind, "cpu", device=device)
    told = f"{found.target}/{found.provider}"
    told += f" -> {found.move_to}" if found.move_to else ""
    told += f", {found.refused_wish[0].code}" if found.refused_wish else ""
    assert told == cell


def test_an_index_that_is_not_there() -> None:
    with pytest.raises(BackendNotAvailableError, match=r"cuda has 2 device\(s\), numbered from 0"):
        planned("two A100", "inference", "cpu", device="cuda:2")


ABSENT = [
    (machine, target.name)
    for machine, kind in MACHINES.items()
    for target in targets.ours()
    if target.name not in kind.here
]


@pytest.mark.parametrize(("machine", "device"), ABSENT)
def test_forced_and_absent_is_one_error_that_lists_what_is_here(machine: str, device: str) -> None:
    for kind in GRAPHS:
        with pytest.raises(BackendNotAvailableError) as caught:
            planned(machine, kind, "cpu", device=device)
        here = [one.name for one in targets.known() if one.name in MACHINES[machine].here]
        for part in (
            f"device '{device}' was forced (from UNIFIED_DEVICE)",
            f"no {device} here",
            f"Available: {', '.join(here)}.",
            f"To get it: buy a {device}",
        ):
            assert part in str(caught.value)


# --- nothing is chosen silently -------------------------------------------------------------------


def everything() -> Iterator[tuple[str, str, str, str, str]]:
    for machine, kind in MACHINES.items():
        for where in sorted({"cpu", accelerator(machine)}):
            for wish in ("auto", *kind.here):
                for graph_kind in GRAPHS:
                    for level in LEVELS:
                        yield machine, where, wish, graph_kind, level


def test_every_plan_that_is_not_the_wished_one_says_why() -> None:
    count = 0
    for machine, where, wish, kind, level in everything():
        found = planned(machine, kind, where, level=level, device=wish)
        case = f"{machine}, tensors on {where}, {wish}, {kind}, {level}: {found.as_dict()}"
        _hold_reasons(found, wish, case)
        count += 1
    assert count > 1500


def _hold_reasons(found: Plan, wish: str, case: str) -> None:
    refused = {(no.target, no.provider) for no in found.rejected if no.region == GRAPH}
    assert all(reason.text for no in found.rejected for reason in no.reasons), case
    # a target that was not chosen has said why, as a whole or by each of its providers
    for target in targets.ours():
        whole = {row.provider for row in target.rows if row.region == GRAPH}
        said = {provider for name, provider in refused if name == target.name}
        assert target.name == found.target or "" in said or whole <= said, case
    # a forced target that was not taken says so where the user is warned
    if wish not in ("auto", found.target):
        assert found.refused_wish, case
    # whoever comes before the chosen provider on its target has said no
    record = targets.find(found.target)
    whole_rows = [row for row in record.rows if row.region == GRAPH] if record else []
    chosen = [row.priority for row in whole_rows if row.provider == found.provider]
    before = {row.provider for row in whole_rows if chosen and row.priority > max(chosen)}
    assert before <= {provider for name, provider in refused if name == found.target}, case
