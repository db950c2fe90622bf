"""Runs that nobody measured, for the tests of what is made of them."""

from __future__ import annotations

from typing import Any

from kernel_dispatch.bench import estimates
from kernel_dispatch.bench.results import Limits, Numerics, Roofline, Row, Run, Speedup


def row(workload: str = "net", contender: str = "unified-O2", ms: float = 10.0, **more: Any) -> Row:
    """Nine samples within one percent around `ms`."""
    samples = [ms * 1e-3 * (1 + step / 400) for step in (0, 1, -1, 2, -2, 3, -3, 4, -4)]
    return Row(
        workload,
        contender,
        "ok",
        **{
            "times": estimates.times(samples, 2),
            "numerics": Numerics(2e-7, 1e-7, 7e-7),
            "roofline": Roofline(10**9, 10**7, 0.005, "compute"),
            **more,
        },
    )


def refused(workload: str, contender: str, status: str, reason: str) -> Row:
    return Row(workload, contender, status, reason=reason)


def run(*rows: Row, **more: Any) -> Run:
    """With speed-ups, if there is a row named eager for the workload."""
    from dataclasses import replace

    eager = {one.workload: one for one in rows if one.contender == "eager"}
    with_speedups = []
    for one in rows:
        base = eager.get(one.workload)
        if base is not None and base.times is not None and one.times is not None:
            found: Speedup = estimates.speedup(base.times.samples, one.times.samples)
            one = replace(one, speedup=found)
        with_speedups.append(one)
    return Run(
        tuple(with_speedups),
        **{
            "machine": {"cpu": "Some CPU", "threads": 2, "torch": "2.13.0"},
            "limits": Limits(2e11, "oneDNN", 3e10),
            "commit": {"id": "0123456789abcdef", "dirty": False},
            "started": "2026-01-02T03:04:05+00:00",
            **more,
        },
    )
