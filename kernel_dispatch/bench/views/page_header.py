"""Where and how a run took place, as the page's definition list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.views import figures
from kernel_dispatch.bench.views.markup import escaped

_UNKNOWN = "not recorded"
_MACHINE = {
    "cpu": "CPU",
    "cpu_capability": "Code path",
    "isa": "ISA",
    "cores": "Cores",
    "threads": "Threads",
    "memory_bytes": "Memory",
    "accelerators": "Accelerators",
    "system": "System",
    "architecture": "Architecture",
    "python": "Python",
    "torch": "torch",
    "kernel_dispatch": "kernel-dispatch",
    "libraries": "Libraries",
}
_ALWAYS = ("cpu", "isa", "threads", "torch", "libraries")


def facts(run: Run) -> str:
    return _list([*_conditions(run), *_limits(run), *_machine(run.machine or {})])


def settings(run: Run) -> str:
    """The settings of the run, in one line."""
    pairs = [f"{key.replace('_', ' ')} {_said(value)}" for key, value in run.settings.items()]
    return escaped("; ".join(pairs) or _UNKNOWN)


def conditions(row: Row) -> str:
    return f"{row.dtype}, {row.device}, {mode(row)}"


def mode(row: Row) -> str:
    return "forward and backward" if row.training else "inference"


def _conditions(run: Run) -> Iterator[tuple[str, str]]:
    yield "Started", _date(run.started) + (f", took {_duration(run.seconds)}" * (run.seconds > 0))
    yield "Commit", _commit(run.commit or {})
    yield "dtype", _each(row.dtype for row in run.rows)
    yield "Device", _each(row.device for row in run.rows)
    yield "Mode", _each(mode(row) for row in run.rows)
    yield "Baseline", run.baseline


def _limits(run: Run) -> Iterator[tuple[str, str]]:
    limits = run.limits
    gemm = f"{figures.flops_rate(limits.gemm_flops)}, {limits.gemm_library or 'library unknown'}"
    yield "Matrix products", gemm if limits.gemm_flops > 0 else "not measured"
    read = figures.bytes_rate(limits.read_bytes) if limits.read_bytes > 0 else "not measured"
    yield "Memory reads", read


def _machine(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, label in _MACHINE.items():
        if machine.get(key) or key in _ALWAYS:
            value = machine.get(key)
            if key == "memory_bytes" and isinstance(value, (int, float)):
                value = figures.bytes_(value)
            yield label, _said(value)
    for key, value in machine.items():
        if key not in _MACHINE and value:
            yield key.replace("_", " "), _said(value)


def _said(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return _UNKNOWN
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _each(values: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or _UNKNOWN


def _commit(commit: Mapping[str, Any]) -> str:
    if not commit.get("id"):
        return _UNKNOWN
    branch = f" on {commit['branch']}" if commit.get("branch") else ""
    return f"{str(commit['id'])[:12]}{branch}{', with local changes' * bool(commit.get('dirty'))}"


def _date(started: str) -> str:
    try:
        return datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return started or _UNKNOWN


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes >= 2 else f"{seconds:.0f} s"


def _list(pairs: list[tuple[str, str]]) -> str:
    return "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd></div>" for label, value in pairs
    )
