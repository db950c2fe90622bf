"""Made-up runs for the tests of page and drawings; nothing here was measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kernel_dispatch.bench.results import (
    Compilation,
    Limits,
    Numerics,
    Roofline,
    Row,
    Run,
    Speedup,
    Times,
)

LIMITS = Limits(gemm_flops=140e9, gemm_library="oneDNN", read_bytes=21e9)
MACHINE = {
    "cpu": "Example CPU 9000 @ 3.0 GHz",
    "isa": ["avx2", "fma"],
    "cores": 2,
    "threads": 2,
    "memory_bytes": 16_000_000_000,
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "libraries": {"oneDNN": "3.8.1", "MKL": "2024.2"},
    "accelerators": [],
}
HOSTILE = (
    "<script>window.hit = 1</script><img src=x onerror='hit=1'>\"'&amp;\x1b[31m\x00\u202e\ud800"
)


def times(median: float, rounds: int = 20, seed: int = 0) -> Times:
    source = random.Random(seed)
    samples = tuple(median * source.lognormvariate(0, 0.02) for _ in range(rounds))
    return Times(samples, 4, median, median * 0.99, median * 1.015, median * 0.985, median * 1.02)


def ok(
    workload: str, contender: str, median: float = 0.01, speedup: float | None = 1.0, **more: object
) -> Row:
    flops, moved = int(median * 6e10), 40_000_000
    limit = max(flops / LIMITS.gemm_flops, moved / LIMITS.read_bytes)
    row = Row(
        workload,
        contender,
        "ok",
        times=times(median, seed=len(workload)),
        speedup=None if speedup is None else Speedup(speedup, speedup * 0.96, speedup * 1.05),
        numerics=Numerics(2.1e-7, 2.0e-7, 8.8e-7),
        compilation=Compilation(3.2, 1.1, 0.01, graphs=2, breaks=1, recompiles=0, fallbacks=0),
        roofline=Roofline(flops, moved, limit, "compute"),
        peak_memory_bytes=123_456_789,
        summary=f"how users run {contender}",
    )
    return replace(row, **more)  # type: ignore[arg-type]


def failed(workload: str, contender: str, status: str = "failed", reason: str = "it broke") -> Row:
    return Row(workload, contender, status, reason=reason)


def run_of(rows: Sequence[Row]) -> Run:
    return Run(
        tuple(rows),
        machine=MACHINE,
        commit={"id": "0123456789abcdef", "dirty": True, "branch": "main"},
        limits=LIMITS,
        started="2026-03-04T05:06:07+00:00",
        seconds=321.0,
        settings={"seed": 0, "rounds": 20, "pairs": True},
    )


def normal() -> Run:
    """Two groups, a baseline, three compared contenders and one that is not installed anywhere."""
    base = {"bert_base": 0.052, "gpt2_small": 0.071, "resnet50": 0.043, "mlp_mixer": 0.018}
    gains = {
        "inductor": (1.31, 1.22, 1.12, 1.40),
        "unified O1": (1.11, 1.05, 1.21, 0.97),
        "unified O2": (1.33, 1.24, 1.19, 1.42),
        "onnxruntime": (1.52, 1.08, 1.61, 0.88),
    }
    rows = []
    for index, (workload, median) in enumerate(base.items()):
        median_flops = int(median * 4e10)
        moved = (450_000_000, 520_000_000, 130_000_000, 60_000_000)[index]
        limit = max(median_flops / LIMITS.gemm_flops, moved / LIMITS.read_bytes)
        cost = Roofline(median_flops, moved, limit, "compute")
        small = 9_876_543 * (index + 1)  # as texts, these sort differently
        rows.append(ok(workload, "eager", median, roofline=cost, peak_memory_bytes=small))
        rows += [
            ok(workload, name, median / gain[index], gain[index], roofline=cost)
            for name, gain in gains.items()
        ]
        rows.append(failed(workload, "openvino", "missing", "needs openvino: pip install openvino"))
    rows += _ops()
    rows[9] = replace(rows[9], report="1 graph, 0 fallbacks\ngraph 0/0 of forward  model.py:12\n")
    rows[10] = failed("gpt2_small", "onnxruntime", "wrong", "error 3.1e-03, allowed 8.8e-07")
    return run_of(rows)


def _ops() -> list[Row]:
    softmax = Roofline(100_000, 500_000, 500e3 / LIMITS.read_bytes, "memory")
    times_of = {"eager": (31e-6, 1.0), "inductor": (27e-6, 1.15), "unified O2": (27e-6, 1.14)}
    rows = [
        ok("softmax 4096", name, median, speedup, group="op", roofline=softmax)
        for name, (median, speedup) in times_of.items()
    ]
    reason = "RuntimeError: no such operator\n  at line 3"
    return [*rows, replace(failed("softmax 4096", "onnxruntime", reason=reason), group="op")]


def many(workloads: int = 25, contenders: int = 8) -> Run:
    names = ["eager", *(f"contender {n}" for n in range(1, contenders))]
    source, rows = random.Random(1), []
    for workload in (f"workload_{number:02}" for number in range(workloads)):
        base, rate = 10 ** source.uniform(-5, 0), 10 ** source.uniform(8.5, 10)
        cost = Roofline(int(base * rate), int(base * 4e9), base / 4, "compute")
        for name in names:
            gain = 1.0 if name == "eager" else 2 ** source.uniform(-1, 2)
            rows.append(ok(workload, name, base / gain, gain, roofline=cost))
    return run_of(rows)


def only_failures() -> Run:
    return run_of(
        [failed("bert_base", "eager"), failed("bert_base", "inductor", "wrong", "nothing matched")]
    )


def hostile() -> Run:
    row = ok(
        HOSTILE,
        f"mean {HOSTILE}",
        speedup=1.2,
        reason=HOSTILE,
        version=HOSTILE,
        summary=HOSTILE,
        report=HOSTILE,
        dtype=HOSTILE,
        numerics=Numerics(float("nan"), float("inf"), 0.0),
    )
    rows = [
        ok(HOSTILE, HOSTILE),
        row,
        failed(HOSTILE, "third", "failed", f"</script>{HOSTILE}]]>-->"),
        replace(failed(HOSTILE, "fourth", HOSTILE, HOSTILE), group=HOSTILE),
    ]
    return Run(
        tuple(rows),
        baseline=HOSTILE,
        machine={HOSTILE: HOSTILE, "cpu": HOSTILE, "libraries": {HOSTILE: HOSTILE}},
        commit={"id": HOSTILE},
        limits=Limits(1e9, HOSTILE, 1e9),
        started=HOSTILE,
        settings={HOSTILE: [HOSTILE, {HOSTILE: float("nan")}]},
    )


def bare() -> Run:
    """Rows with nothing that could be left out."""
    return Run(
        (
            Row("w", "eager", "ok", times=Times((), 1, 0.0, 0.0, 0.0, 0.0, 0.0)),
            Row("w", "other", "ok"),
            Row("w", "third", "ok", roofline=Roofline(0, 0, 0.0, "memory"), times=times(1e-3)),
        )
    )


def not_numbers() -> Run:
    nan, inf = float("nan"), float("inf")
    odd = {
        "times": Times((nan, inf, 0.0, -1.0, 0.01), 1, 0.01, nan, inf, nan, nan),
        "numerics": Numerics(inf, nan, 0.0),
    }
    rows = [ok("w", "eager"), ok("w", "odd", **odd), ok("w", "odder", speedup=inf)]
    rows[1] = replace(rows[1], speedup=Speedup(1.5, nan, inf))
    return replace(run_of(rows), limits=Limits(inf, "", nan))


EVERY = {
    "normal": normal,
    "only failures": only_failures,
    "one row": lambda: run_of([ok("alone", "eager")]),
    "200 rows": many,
    "hostile": hostile,
    "bare": bare,
    "not numbers": not_numbers,
    "empty": lambda: Run(()),
}
