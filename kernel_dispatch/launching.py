"""Which cores each instance of a launched script gets. Pure: the machine comes in as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_dispatch.user_code import UsageError


@dataclass(frozen=True)
class Placement:
    """The CPU numbers of each instance, and what a user should know of the choice."""

    instances: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def cores_each(self) -> int:
        return len(self.instances[0])


def place(
    cores: Mapping[int, Sequence[int]],  # NUMA node -> a CPU number of each core we may use
    quota: float | None,  # of the cgroup, in cores
    ncores: int | None = None,
    node: int | None = None,
    instances: int = 1,
) -> Placement:
    """Physical cores only, no instance across NUMA nodes, never more at once than may run."""
    from lowering.machine import effective_cores  # imports torch, which `--help` does not wait for

    if node is not None and node not in cores:
        known = ", ".join(map(str, sorted(cores)))
        raise UsageError(
            f"--node {node}: no core of that NUMA node may be used here. Nodes: {known}."
        )
    pools = (
        {node: list(cores[node])} if node is not None else {n: list(c) for n, c in cores.items()}
    )
    shares = _shares(pools, instances)
    room = min(len(pools[n]) // share for n, share in shares.items())
    runnable = effective_cores(sum(map(len, pools.values())), quota)
    if room < 1 or runnable < instances:
        raise UsageError(
            f"--instances {instances}: each needs a core of its own, and {_these(pools, quota)}."
        )
    most = min(room, runnable // instances)
    if ncores is not None and ncores > most:
        plural = "s" * (most != 1)
        raise UsageError(
            f"--ncores {ncores}: at most {most} core{plural} for each of {instances} instance"
            f"{'s' * (instances != 1)}; {_these(pools, quota)}."
        )
    each = ncores or most
    placed = sorted(
        tuple(pools[n][i * each : (i + 1) * each])
        for n, share in shares.items()
        for i in range(share)
    )
    _demand_in_order(placed, shares)
    return Placement(tuple(placed), tuple(_notes(cores, shares, node, most, room)))


def _demand_in_order(placed: Sequence[Sequence[int]], shares: Mapping[int, int]) -> None:
    """run_cpu sorts all cores before it deals them out, so nodes whose CPU numbers alternate
    would be mixed."""
    flat = [cpu for one in placed for cpu in one]
    if flat != sorted(flat):
        apart = " and ".join(
            f"`launch --node {n} --instances {share} ...`" for n, share in sorted(shares.items())
        )
        raise UsageError(
            f"--instances {len(placed)}: the CPU numbers of the NUMA nodes alternate here, and one "
            f"launch would mix them; start {apart} side by side."
        )


def _shares(pools: Mapping[int, Sequence[int]], instances: int) -> dict[int, int]:
    """node -> how many instances: one by one to the node that has the most cores left for each."""
    shares = dict.fromkeys(pools, 0)
    for _ in range(instances):
        best = max(pools, key=lambda n: (len(pools[n]) / (shares[n] + 1), -n))
        shares[best] += 1
    return {n: share for n, share in shares.items() if share}


def _these(pools: Mapping[int, Sequence[int]], quota: float | None) -> str:
    parts = [f"node {n} has {len(pool)}" for n, pool in sorted(pools.items())]
    limit = f", and the cgroup's quota is {quota:g} cores" if quota is not None else ""
    return f"of the physical cores that this process may use, {', '.join(parts)}{limit}"


def _notes(
    cores: Mapping[int, Sequence[int]],
    shares: Mapping[int, int],
    node: int | None,
    most: int,
    room: int,
) -> list[str]:
    notes = []
    idle = sorted(set(cores) - set(shares))
    if idle and node is None:
        nodes = ", ".join(map(str, idle))
        notes.append(f"NUMA node {nodes} stays idle: --instances {len(cores)} uses all of them")
    if most < room:
        notes.append(f"the cgroup's quota allows {most} of {room} cores each")
    return notes
