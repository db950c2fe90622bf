"""Intel Xeon: what there is to know of it, and `python -m kernel_dispatch launch`.

A Xeon is fast by the libraries that other providers call (oneDNN, MKL) and by where its threads
run. The second cannot be done to a graph: threads are bound before torch starts them. So this
provider has no capability rows and computes nothing; it tells the facts, and the launcher acts
on them, on any x86 Linux.
"""

from __future__ import annotations

from lowering import machine
from lowering.contract import Probe, Provider
from lowering.topology import topology

_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
_AMX = ("amx_bf16", "amx_int8", "amx_fp16")


def probe() -> Probe:
    cpu, found = machine.cpu(), topology()
    facts = {
        "isa": [name for name in (*_ISA, *_AMX) if name in cpu.isa],
        "sockets": found.sockets,
        "numa_nodes": list(found.nodes),
        "physical_cores": found.physical_cores,
        "threads_per_core": found.threads_per_core,
    }
    if cpu.vendor != "intel" or "xeon" not in cpu.model.lower():
        reason = f"this CPU is {cpu.model} ({cpu.vendor or 'vendor unknown'}), not an Intel Xeon"
        return Probe.no(f"{reason}; `python -m kernel_dispatch launch` does its work here too")
    amx = "with AMX" if any(name in cpu.isa for name in _AMX) else "without AMX"
    return Probe.yes(f"{cpu.model}, {amx}; {found}", **facts)


PROVIDER = Provider(
    name="xeon",
    summary="facts and `launch` only: it computes no graph itself",
    probe=probe,
)
