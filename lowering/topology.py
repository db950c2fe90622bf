"""How the CPUs of this machine hang together: threads of a core, sockets, NUMA nodes.

From Linux's /sys alone; other systems answer with nothing. Which of the CPUs this process may use
is a question apart (affinity, cgroups: `lowering.machine`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from lowering.machine import Read, read_text

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"


@dataclass(frozen=True)
class Cpu:
    """One logical CPU, by the number that affinity masks use."""

    number: int
    core: tuple[int, int]  # (socket, the core's number in it): equal for the threads of a core
    node: int


@dataclass(frozen=True)
class Topology:
    cpus: tuple[Cpu, ...] = ()

    @property
    def sockets(self) -> int:
        return len({cpu.core[0] for cpu in self.cpus})

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cpu.node for cpu in self.cpus}))

    @property
    def physical_cores(self) -> int:
        return len({cpu.core for cpu in self.cpus})

    @property
    def threads_per_core(self) -> int:
        return -(-len(self.cpus) // self.physical_cores) if self.cpus else 1

    def one_thread_of_each_core(self, allowed: frozenset[int]) -> dict[int, list[int]]:
        """node -> CPU numbers: of each core that may be used, its first thread that may."""
        found: dict[int, list[int]] = {}
        taken: set[tuple[int, int]] = set()
        for cpu in sorted(self.cpus, key=lambda cpu: cpu.number):
            if cpu.number in allowed and cpu.core not in taken:
                taken.add(cpu.core)
                found.setdefault(cpu.node, []).append(cpu.number)
        return found

    def __str__(self) -> str:
        if not self.cpus:
            return "not told by this system"
        threads = self.threads_per_core
        return ", ".join(
            (
                _counted(self.sockets, "socket"),
                _counted(len(self.nodes), "NUMA node"),
                _counted(self.physical_cores, "physical core"),
                f"{threads} threads per core" if threads > 1 else "no SMT",
            )
        )


@functools.cache
def topology() -> Topology:
    """This machine, read once."""
    return topology_from(read_text)


def topology_from(read: Read) -> Topology:
    nodes = {
        cpu: node
        for node in numbers(read(f"{_NODES}/online") or "")
        for cpu in numbers(read(f"{_NODES}/node{node}/cpulist") or "")
    }
    return Topology(
        tuple(
            Cpu(cpu, core, nodes.get(cpu, 0))
            for cpu in numbers(read(f"{_CPUS}/online") or "")
            if (core := _core(read, cpu)) is not None
        )
    )


def _core(read: Read, cpu: int) -> tuple[int, int] | None:
    folder = f"{_CPUS}/cpu{cpu}/topology"
    socket, core = read(f"{folder}/physical_package_id"), read(f"{folder}/core_id")
    if socket is None or core is None:
        return None
    return int(socket), int(core)


def numbers(text: str) -> Iterator[int]:
    """0-2,5 -> 0, 1, 2, 5."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
