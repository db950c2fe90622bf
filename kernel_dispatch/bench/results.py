"""What a benchmark run found, as plain data: one `Row` per workload and contender.

`storing.py` writes it in pytest-benchmark's format and reads it back; `page.py` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE = "eager"  # what every contender is measured by

# What became of a row. Only "ok" has times; every other one has a reason.
STATUSES = {
    "ok": "verified, then timed",
    "missing": "not installed here, or absent for this workload",
    "failed": "raised while it was prepared, compiled or run",
    "wrong": "its output breaks the numerics it promises; it was not timed",
    "recompiled": "it compiled again while it was timed; its times mean nothing",
    "different": "it built other weights or inputs than the baseline; there is nothing to compare",
}


@dataclass(frozen=True)
class Times:
    """Seconds per call. `low` and `high` bound the median with 95% confidence."""

    samples: tuple[float, ...]  # one per round, in the order of the rounds
    calls: int  # per sample
    median: float
    low: float
    high: float
    q1: float
    q3: float


@dataclass(frozen=True)
class Speedup:
    """Baseline's time over this one's, from pairs of one round each, with 95% confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Numerics:
    """Largest errors against float64 over the outputs (and gradients), and what was allowed."""

    error: float
    baseline_error: float
    allowed: float


@dataclass(frozen=True)
class Compilation:
    """`first_call`: in a process with empty caches; `second_process`: with the caches it left.

    Both include one run; the compiler itself is imported and warm in both. None: not measured.
    """

    first_call_s: float | None = None
    second_process_s: float | None = None
    prepare_s: float = 0.0  # what the contender does before the first call (export, convert)
    graphs: int | None = None
    breaks: int | None = None
    recompiles: int | None = None  # before timing, while it warmed up
    fallbacks: int | None = None  # `unified` only: what its report tells


@dataclass(frozen=True)
class Roofline:
    """What the case costs at least: its FLOPs, and every weight, input and output moved once."""

    flops: int
    bytes: int
    limit_s: float  # at the measured GEMM rate and bandwidth of this machine
    bound: str  # "compute" or "memory"


@dataclass(frozen=True)
class Row:
    workload: str
    contender: str
    status: str
    group: str = "model"
    reason: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    training: bool = False
    times: Times | None = None
    speedup: Speedup | None = None
    numerics: Numerics | None = None
    compilation: Compilation = field(default_factory=Compilation)
    roofline: Roofline | None = None
    peak_memory_bytes: int | None = None  # above the process before the case was built
    version: str = ""  # the contender's own, where it is not torch's
    summary: str = ""  # how the contender is run
    report: str = ""  # `unified` only: its report as text

    @property
    def limit_fraction(self) -> float | None:
        """How much of the machine's limit was reached; None without times or roofline."""
        if self.times is None or self.roofline is None or not self.roofline.limit_s:
            return None
        return self.roofline.limit_s / self.times.median


@dataclass(frozen=True)
class Limits:
    """The machine's own limits, measured by the same run with the same threads."""

    gemm_flops: float = 0.0  # per second, in the dtype of the run
    gemm_library: str = ""  # whose product reached it
    read_bytes: float = 0.0  # per second


@dataclass(frozen=True)
class Run:
    rows: tuple[Row, ...]
    baseline: str = BASELINE
    # cpu, isa, cores, threads, memory_bytes, python, torch, libraries, accelerator ...
    machine: Mapping[str, Any] = field(default_factory=dict)
    commit: Mapping[str, Any] = field(default_factory=dict)  # id, dirty, branch; empty: no checkout
    limits: Limits = field(default_factory=Limits)
    started: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # seed, rounds, budget ...

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(row.contender for row in self.rows))

    def of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]
