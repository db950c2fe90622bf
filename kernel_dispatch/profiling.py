"""Where the time of compiled code goes: to regions and their providers, to generated kernels, to
torch's own operators outside of any region, and to what lies between them.

Read off torch's profiler. Operators of ours carry provider and region in their name; every event
belongs to the outermost operator or kernel around it. On a GPU the device's time is counted, on a
CPU that of the thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_dispatch.reporting import Report
from lowering import providers

REGION, GENERATED, OUTSIDE, BETWEEN = "region", "generated", "outside", "between"
KINDS = {
    REGION: "regions, by the provider that computed them",
    GENERATED: "kernels that Inductor generated",
    OUTSIDE: "operators outside of any region",
    BETWEEN: "between kernels: Python, Dynamo's guards, dispatch",
}

_OPERATOR = re.compile(r"^([A-Za-z_]\w*)::(\w+)$")
_NO_OPERATORS = ("autograd", "c10", "cuda", "hip")  # namespaces of other events
_GENERATED = re.compile(r"cpp_fused_|^triton_|^cpp_")
_COMPILED = re.compile(r"^Torch-Compiled Region|CompiledFunctionBackward|^## Call CompiledFxGraph")
# Operators of ours whose name is not "provider_region".
_REGIONS = {
    "reduced_linear": ("triton", "linear"),
    "openmp_convolutions": ("openmp", "convolution"),
    "mkl_linear_native": ("mkl", "linear"),
    "openmp_linears": ("openmp", "linear"),
    "openmp_gated_linear": ("openmp", "linear"),
    "openmp_gathered_linear": ("openmp", "grouped_linear"),
    "openmp_embedding_bags": ("openmp", "embedding_bag"),
    "openmp_gated_linear_half": ("openmp", "linear"),
    "openmp_linear_half": ("openmp", "linear"),
    "openmp_linears_half": ("openmp", "linear"),
    "openmp_moments": ("openmp", "batch_norm"),
    "openmp_norm_sums": ("openmp", "batch_norm"),
    "recurrent": ("eager", "recurrent"),
}


@dataclass
class Row:
    """Everything of one name."""

    kind: str
    name: str  # of a region: its own, else the operator's or kernel's
    provider: str = ""
    microseconds: float = 0.0
    runs: int = 0


@dataclass(frozen=True)
class Profile:
    """What was measured over `calls` calls (None: a script, as often as it called them)."""

    rows: tuple[Row, ...]  # the longest first
    calls: int | None
    clock: str  # "cpu" or the device whose time this is
    graphs: Report

    @property
    def microseconds(self) -> float:
        return sum(row.microseconds for row in self.rows)

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def share(self, rows: Iterable[Row]) -> float:
        total = self.microseconds
        return sum(row.microseconds for row in rows) / total if total else 0.0

    def as_dict(self, top: int) -> dict[str, Any]:
        shown = {kind: self.of(kind) for kind in KINDS}
        return {
            "calls": self.calls,
            "clock": self.clock,
            "microseconds": self.microseconds,
            "shares": {kind: self.share(rows) for kind, rows in shown.items()},
            "left_out": {kind: max(0, len(rows) - top) for kind, rows in shown.items()},
            **{
                kind: [{**vars(row), "share": self.share([row])} for row in rows[:top]]
                for kind, rows in shown.items()
            },
        }

    def text(self, top: int) -> str:
        calls = "the calls of the script" if self.calls is None else f"{self.calls} calls"
        lines = [f"{_time(self.microseconds)} in {calls}, {self.clock} time"]
        for kind, title in KINDS.items():
            rows = self.of(kind)
            lines.append(f"{self.share(rows):4.0%}  {title}" + ("" if rows else ": none"))
            if kind == BETWEEN:
                continue
            lines += [self._line(row) for row in rows[:top]]
            if len(rows) > top:
                rest = rows[top:]
                lines.append(f"      {self.share(rest):4.0%}  {len(rest)} more (--top shows more)")
        return "\n".join(lines)

    def _line(self, row: Row) -> str:
        by = f" by {row.provider}" if row.provider else ""
        share = self.share([row])
        return f"      {share:4.0%}  {_time(row.microseconds):>9}  {row.runs:>6}x  {row.name}{by}"


def read(
    events: Iterable[Any], graphs: Report, calls: int | None, only_compiled: bool = False
) -> Profile:
    """`only_compiled`: leave out what ran outside of compiled code (a script's preparations)."""
    found = [event for event in events if _is_on_host(event)]
    if only_compiled:
        found = [event for event in found if any(_COMPILED.search(n) for n in _names(event))]
    on_device = any(event.self_device_time_total for event in found)
    rows: dict[tuple[str, str, str], Row] = {}
    for event in found:
        kind, provider, name, is_first = _owner(event, on_device)
        row = rows.setdefault((kind, provider, name), Row(kind, name, provider))
        row.microseconds += event.self_device_time_total if on_device else event.self_cpu_time_total
        row.runs += is_first
    longest = sorted(rows.values(), key=lambda row: -row.microseconds)
    clock = next(iter({g.target for g in graphs} - {"cpu"}), "device") if on_device else "cpu"
    return Profile(tuple(longest), calls, clock, graphs)


def activities() -> Sequence[Any]:
    """The host, and the GPU where there is one."""
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]


def _is_on_host(event: Any) -> bool:
    """Kernels have lines of their own as well; their time is at the event that launched them."""
    return event.device_type == torch._C._autograd.DeviceType.CPU


def _owner(event: Any, on_device: bool) -> tuple[str, str, str, bool]:
    """(kind, provider, name, whether the event itself is what is named)."""
    path = _path(event)
    for at in reversed(path):  # from the outside in
        name = at.name
        if found := _OPERATOR.match(name):
            if found[1] in _NO_OPERATORS:
                continue
            return (*_operator(found[1], found[2]), at is event)
        if _GENERATED.search(name):
            return GENERATED, "inductor", _plain(name), at is event
        if on_device and name.startswith("## Call CompiledFxGraph"):
            inner = [_OPERATOR.match(one.name) for one in path[: path.index(at)]]
            if not any(inner):  # Triton kernels are launched from the graph's own Python
                return GENERATED, "inductor", "kernels of a graph", at is event
    return BETWEEN, "", "between", True


def _operator(namespace: str, name: str) -> tuple[str, str, str]:
    """kind, provider and name of an operator."""
    if namespace == "triton_kernels":
        return REGION, "triton", name
    if namespace == "unified_metal":
        return REGION, "metal", name
    if namespace == "kernel_dispatch":
        if name in _REGIONS:
            return (REGION, *_REGIONS[name])
        for provider in sorted(providers.names(), key=len, reverse=True):
            if name.startswith(f"{provider}_"):
                return REGION, provider, name.removeprefix(f"{provider}_")
    return OUTSIDE, "", f"{namespace}::{name}"


def _plain(kernel: str) -> str:
    """Without the number of the graph, by which no reader knows it."""
    return re.sub(r"^graph_\d+_", "", kernel)


def _path(event: Any) -> list[Any]:
    """The event, and those around it."""
    found = []
    while event is not None:
        found.append(event)
        event = event.cpu_parent
    return found


def _names(event: Any) -> list[str]:
    return [one.name for one in _path(event)]


def _time(microseconds: float) -> str:
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= scale:
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds:.3g} us"


def kernel_events() -> Mapping[str, Any]:
    """Inductor config by which generated C++ kernels tell the profiler that they run."""
    return {"cpp.enable_kernel_profile": True}
