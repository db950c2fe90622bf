"""Machines that are not this one, by what their /sys says; and this one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from lowering import machine
from lowering.providers import xeon
from lowering.topology import Topology, numbers, topology, topology_from

pytestmark = pytest.mark.quick


def sys_of(*cpus: tuple[int, int, int]) -> dict[str, str]:
    """/sys of a machine whose CPU number i is (socket, core, node)."""
    nodes = sorted({node for _, _, node in cpus})
    files = {"/sys/devices/system/cpu/online": ",".join(map(str, range(len(cpus)))) + "\n"}
    files["/sys/devices/system/node/online"] = ",".join(map(str, nodes)) + "\n"
    for node in nodes:
        mine = [str(i) for i, cpu in enumerate(cpus) if cpu[2] == node]
        files[f"/sys/devices/system/node/node{node}/cpulist"] = ",".join(mine) + "\n"
    for i, (socket, core, _) in enumerate(cpus):
        folder = f"/sys/devices/system/cpu/cpu{i}/topology"
        files[f"{folder}/physical_package_id"] = f"{socket}\n"
        files[f"{folder}/core_id"] = f"{core}\n"
    return files


# Two sockets of two cores, each with two threads; Linux numbers second threads behind all cores.
XEON = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)] * 2


def test_sockets_nodes_and_threads() -> None:
    found = topology_from(sys_of(*XEON).get)
    assert str(found) == "2 sockets, 2 NUMA nodes, 4 physical cores, 2 threads per core"
    assert found.nodes == (0, 1)
    everything = frozenset(range(8))
    assert found.one_thread_of_each_core(everything) == {0: [0, 1], 1: [2, 3]}


def test_a_cpu_set_may_hold_second_threads_only() -> None:
    found = topology_from(sys_of(*XEON).get)
    assert found.one_thread_of_each_core(frozenset({4, 1, 5, 6})) == {0: [1, 4], 1: [6]}
    assert found.one_thread_of_each_core(frozenset()) == {}


def test_cores_of_two_sockets_with_one_number_are_two() -> None:
    assert topology_from(sys_of((0, 0, 0), (1, 0, 0)).get).physical_cores == 2


def test_a_system_that_tells_nothing() -> None:
    found = topology_from({}.get)
    assert found == Topology()
    assert str(found) == "not told by this system"
    assert found.threads_per_core == 1


def test_a_kernel_without_numa_has_one_node() -> None:
    files = {name: text for name, text in sys_of(*XEON).items() if "/node" not in name}
    assert topology_from(files.get).nodes == (0,)


def test_lists_of_numbers() -> None:
    assert list(numbers("0-2,5\n")) == [0, 1, 2, 5]
    assert list(numbers("\n")) == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_this_machine() -> None:
    found = topology()
    assert len(found.cpus) <= machine.cpu().logical_cores
    assert found.physical_cores * found.threads_per_core >= len(found.cpus) > 0
    allowed = frozenset(os.sched_getaffinity(0))
    ours = found.one_thread_of_each_core(allowed)
    assert {cpu for cpus in ours.values() for cpu in cpus} <= allowed


# --- the provider that tells these facts ----------------------------------------------------------


def test_a_xeon_tells_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "sse4_2"})
    model = "Intel(R) Xeon(R) Platinum 8480+"
    facts = replace(machine.cpu(), vendor="intel", model=model, isa=isa)
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    monkeypatch.setattr(xeon, "topology", lambda: topology_from(sys_of(*XEON).get))
    found = xeon.probe()
    assert found.available
    assert found.version.startswith(f"{model}, with AMX; 2 sockets, 2 NUMA nodes")
    assert found.details["isa"] == ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]
    assert found.details["numa_nodes"] == [0, 1]
    assert (found.details["physical_cores"], found.details["threads_per_core"]) == (4, 2)


@pytest.mark.parametrize(
    ("vendor", "model"),
    [("amd", "AMD EPYC 9654"), ("intel", "Intel(R) Core(TM) Ultra 7 155H"), ("", "unknown CPU")],
)
def test_other_cpus_are_told_what_they_are(
    monkeypatch: pytest.MonkeyPatch, vendor: str, model: str
) -> None:
    facts = replace(machine.cpu(), vendor=vendor, model=model)
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    found = xeon.probe()
    assert not found.available
    assert f"this CPU is {model}" in found.reason
    assert "not an Intel Xeon" in found.reason
    assert "launch" in found.reason
