"""A run as files: JSON that pytest-benchmark reads too, and flat CSV.

`pytest-benchmark compare` wants `benchmarks[].stats`; what only we know lies in `extra_info`. Rows
without times have no place there and are kept under `not_measured`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_dispatch._version import __version__
from kernel_dispatch.bench import estimates
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
from lowering.errors import UnifiedError

_PARTS: Mapping[str, Any] = {
    "times": Times,
    "speedup": Speedup,
    "numerics": Numerics,
    "compilation": Compilation,
    "roofline": Roofline,
}


class BenchmarkFileError(UnifiedError, ValueError):
    """A file that is no benchmark result, or not one that can be compared."""


# --- JSON -----------------------------------------------------------------------------------------


def to_json(run: Run) -> str:
    measured = [row for row in run.rows if row.times is not None]
    others = [row for row in run.rows if row.times is None]
    record = {
        "version": f"kernel-dispatch {__version__}",
        "datetime": run.started,
        "machine_info": {**run.machine, "node": "", "cpu": {"brand_raw": run.machine.get("cpu")}},
        "commit_info": run.commit,
        "benchmarks": [_benchmark(row) for row in measured],
        "not_measured": [dataclasses.asdict(row) for row in others],
        "run": {
            "baseline": run.baseline,
            "limits": dataclasses.asdict(run.limits),
            "seconds": run.seconds,
            "settings": dict(run.settings),
            "machine": dict(run.machine),
        },
    }
    return json.dumps(record, indent=1, default=str)


def _benchmark(row: Row) -> dict[str, Any]:
    assert row.times is not None
    name = f"{row.workload}[{row.contender}]"
    return {
        "group": row.workload,
        "name": name,
        "fullname": f"{name} {row.device} {row.dtype}{' training' if row.training else ''}",
        "params": {"workload": row.workload, "contender": row.contender},
        "param": row.contender,
        "extra_info": dataclasses.asdict(row),
        "options": {},
        "stats": _stats(row.times),
    }


def _stats(times: Times) -> dict[str, Any]:
    """The names and meanings are pytest-benchmark's."""
    samples, n = times.samples, len(times.samples)
    mean, deviation = statistics.fmean(samples), statistics.stdev(samples) if n > 1 else 0.0
    spread = times.q3 - times.q1
    low, high = times.q1 - 1.5 * spread, times.q3 + 1.5 * spread
    mild = sum(not low <= sample <= high for sample in samples)
    outside = sum(abs(sample - mean) > deviation for sample in samples)
    return {
        "min": min(samples),
        "max": max(samples),
        "mean": mean,
        "stddev": deviation,
        "rounds": n,
        "median": times.median,
        "iqr": spread,
        "q1": times.q1,
        "q3": times.q3,
        "iqr_outliers": mild,
        "stddev_outliers": outside,
        "outliers": f"{outside};{mild}",
        "ld15iqr": min((s for s in samples if s >= low), default=min(samples)),
        "hd15iqr": max((s for s in samples if s <= high), default=max(samples)),
        "ops": 1 / mean if mean else math.inf,
        "total": sum(samples),
        "data": list(samples),
        "iterations": times.calls,
    }


def load(path: str) -> Run:
    """A file of ours, or one that `pytest --benchmark-json` wrote."""
    try:
        return _run(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise BenchmarkFileError(f"cannot read {path!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BenchmarkFileError(
            f"{path!r} is not a benchmark result: write one with --json, or with "
            f"pytest --benchmark-json."
        ) from None


def _run(record: Mapping[str, Any]) -> Run:
    benchmarks = record["benchmarks"]
    if "run" not in record:
        return Run(tuple(map(_foreign, benchmarks)), machine=record.get("machine_info") or {})
    rows = [one["extra_info"] for one in benchmarks] + record["not_measured"]
    told = record["run"]
    return Run(
        rows=tuple(map(_row, rows)),
        baseline=told["baseline"],
        machine=told["machine"],
        commit=record["commit_info"],
        limits=Limits(**told["limits"]),
        started=record["datetime"],
        seconds=told["seconds"],
        settings=told["settings"],
    )


def _row(record: Mapping[str, Any]) -> Row:
    fields = dict(record)
    for name, kind in _PARTS.items():
        if fields.get(name) is not None:
            fields[name] = kind(**fields[name])
    if fields["times"] is not None:
        fields["times"] = dataclasses.replace(
            fields["times"], samples=tuple(fields["times"].samples)
        )
    return Row(**fields)


def _foreign(benchmark: Mapping[str, Any]) -> Row:
    """pytest-benchmark's own: a name and statistics. Without its data the quartiles have to do."""
    stats, params = benchmark["stats"], benchmark.get("params") or {}
    samples = stats.get("data") or [stats["q1"], stats["median"], stats["q3"]]
    times = estimates.times(samples, stats.get("iterations", 1))
    contender = str(params.get("contender", benchmark.get("param") or ""))
    workload = str(params.get("workload") or benchmark["fullname"])
    return Row(workload, contender, "ok", str(benchmark.get("group") or "model"), times=times)


# --- CSV ------------------------------------------------------------------------------------------

COLUMNS = (
    "workload contender status device dtype training median_s low_s high_s rounds calls speedup "
    "speedup_low speedup_high limit_fraction error allowed_error first_call_s second_process_s "
    "prepare_s peak_memory_bytes graphs breaks recompiles fallbacks flops bytes version reason"
).split()


def to_csv(run: Run) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in run.rows)
    return stream.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """None becomes an empty cell."""
    times, speedup, numerics, compilation = row.times, row.speedup, row.numerics, row.compilation
    return {
        **{name: getattr(row, name) for name in ("workload", "contender", "status", "device")},
        **{name: getattr(row, name) for name in ("dtype", "training", "version", "reason")},
        "median_s": times and times.median,
        "low_s": times and times.low,
        "high_s": times and times.high,
        "rounds": times and len(times.samples),
        "calls": times and times.calls,
        "speedup": speedup and speedup.value,
        "speedup_low": speedup and speedup.low,
        "speedup_high": speedup and speedup.high,
        "limit_fraction": row.limit_fraction,
        "error": numerics and numerics.error,
        "allowed_error": numerics and numerics.allowed,
        "first_call_s": compilation.first_call_s,
        "second_process_s": compilation.second_process_s,
        "prepare_s": compilation.prepare_s,
        "peak_memory_bytes": row.peak_memory_bytes,
        "graphs": compilation.graphs,
        "breaks": compilation.breaks,
        "recompiles": compilation.recompiles,
        "fallbacks": compilation.fallbacks,
        "flops": row.roofline and row.roofline.flops,
        "bytes": row.roofline and row.roofline.bytes,
    }
