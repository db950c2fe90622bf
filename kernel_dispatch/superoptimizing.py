"""`superoptimize(fn, inputs)`: try every way that is here, keep the fastest one that is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_dispatch import devices
from kernel_dispatch.bench.results import BASELINE, Speedup
from kernel_dispatch.callables import given_to_torch
from kernel_dispatch.contest import Clock, Contest, Contestant, Entry, Limit
from kernel_dispatch.explaining import unified_apart
from kernel_dispatch.registry import availability, select_backend, table
from kernel_dispatch.rehearsing import module_of, state_of
from kernel_dispatch.reporting import Report, report
from kernel_dispatch.settings import resolve
from lowering import targets
from lowering.contract import Target
from lowering.errors import BackendNotAvailableError, SettingError, unknown
from lowering.levels import Level

Function = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """One way to compute it, and what became of it."""

    name: str
    status: str  # a key of STATUSES
    reason: str
    seconds: float | None  # per call, the median over the rounds; None: it was not timed
    speedup: Speedup | None  # baseline's time over this one's, round by round
    error: float | None  # against float64, of the output that used most of its bound
    bound: float | None
    compile_seconds: float
    computed_by: tuple[str, ...] = ()  # who computed the graphs and the regions in them
    samples: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "speedup": self.speedup and vars(self.speedup)}


STATUSES = {
    "fastest": "verified, timed, and what the result calls",
    "slower": "verified and timed; another one is faster",
    "wrong": "its results break what it promises; it was not timed, or is not kept",
    "failed": "it raised while it was compiled, verified or timed",
    "recompiled": "it compiles again in calls that are alike; its times mean nothing",
    "unverified": "nothing can be compared, so nothing but the baseline can be kept",
}


@dataclass(frozen=True)
class Superoptimized:
    """Call it as you called the function: it calls the fastest candidate that was right.

    `print` it for the table of all candidates. `fn` is the chosen callable itself: the function
    that was given, where nothing is faster.
    """

    fn: Function
    candidates: tuple[Candidate, ...]
    of: str
    training: bool
    graphs: Report = field(repr=False)
    note: str = ""  # how results were compared, where not with float64

    @property
    def chosen(self) -> Candidate:
        return next(one for one in self.candidates if one.status == "fastest")

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def speedup(self) -> float:
        """The baseline's time over the chosen one's; 1.0 where the baseline is kept."""
        found = self.chosen.speedup
        return 1.0 if found is None or self.name == BASELINE else found.value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def as_dict(self) -> dict[str, Any]:
        rows = [candidate.as_dict() for candidate in self.candidates]
        return {
            "name": self.name,
            "speedup": self.speedup,
            "training": self.training,
            "note": self.note,
            "candidates": rows,
        }

    def __str__(self) -> str:
        timed = "forward and backward" if self.training else "forward"
        rows = [_cells(candidate) for candidate in self.candidates]
        table = [("candidate", "status", "time", "speed-up", "error / bound", "compiled", "by")]
        widths = [max(len(row[i]) for row in table + rows) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table + rows
        ]
        lines += [f"{one.name}: {one.reason}" for one in self.candidates if one.reason]
        lines += [self.note] if self.note else []
        return "\n".join([f"superoptimize of {self.of}, {timed}: {self.name}", *lines])


def superoptimize(
    fn: Function,
    inputs: Any,
    backend: Any = None,
    *,
    levels: Iterable[Any] = ("O1", "O2", "O3"),
    tolerance: float | None = None,
    seconds: float = 5.0,
    also: Mapping[str, Callable[[Function], Function]] | None = None,
    clock: Clock = time.perf_counter,
) -> Superoptimized:
    """The fastest verified way to call `fn(*inputs)`; never one that was slower than `fn` itself.

    fn: a module, a method of one, or a function; as it is (train or eval) and in the caller's
        gradient mode: where the outputs require gradients, a call is forward and backward.
    inputs: a tensor, a tuple or list of arguments, or a dict of keyword arguments. They are copied.
    backend: one of the fourteen provider names, or a target: only its way of compiling is tried.
        None: all that `unified` has.
    levels: a candidate for each; O3 may take minutes to compile.
    tolerance: how far a layer in fewer bits may be off at O3; the setting in force if None.
    seconds: for timing, all candidates together. Compiling comes on top.
    also: candidates of your own, name -> a function that gets `fn` and gives what is called.
    clock: seconds, as time.perf_counter has them.
    """
    fn = given_to_torch(fn)
    _demand_arguments(fn, seconds)
    wanted = list(dict.fromkeys(Level.parse(level, "levels=") for level in _listed(levels)))
    arguments = _arguments(inputs)
    options = {} if backend is None else _options_of(backend, state_of(module_of(fn), arguments))
    if tolerance is not None:
        options["tolerance"] = tolerance
    contestants = [_unified(level, options) for level in wanted]
    contestants += [Contestant(name, make) for name, make in (also or {}).items()]
    _demand_names(contestants)
    contest = Contest(fn, arguments, module_of(fn), float(seconds), clock)
    entries = contest.run(contestants)
    best = next(entry for entry in entries if entry.status == "fastest")
    assert best.fn is not None, "what was timed was made before"
    return Superoptimized(
        fn=best.fn,
        candidates=tuple(map(_candidate, entries)),
        of=getattr(fn, "__qualname__", type(fn).__name__),
        training=contest.training,
        graphs=report(best.fn) if best.name != BASELINE else Report(),
        note=contest.truth.note if contest.truth is not None else "",
    )


def _unified(level: Level, options: Mapping[str, Any]) -> Contestant:
    own = {**options, "level": str(level)}
    settings = resolve(None, own)  # what is wrong with an option is told before anything compiles
    given_away = settings.tolerance if level >= Level.O3 else 0.0
    return Contestant(
        f"unified {level}", lambda fn: unified_apart(fn, {"options": own}), Limit(also=given_away)
    )


# --- a backend by name ----------------------------------------------------------------------------


def _options_of(backend: Any, tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """What confines `unified` to one provider, or to one target; an error if it is not here."""
    info = table.find(backend)
    if info is not None:
        name = select_backend(info.name)
        machine, config = devices.this_machine(), resolve().config
        here = availability.targets_of(info, machine, config)
        return {"provider": name, "device": _holding(here, tensors).name}
    target = targets.find(targets.resolve_name(str(backend)) or "")
    if target is None:
        accepted = [*table.BY_NAME, *targets.accepted_names()]
        raise unknown("backend", backend, accepted, "backend=")
    found = devices.probe(target)
    if not found.available:
        raise BackendNotAvailableError(
            f"Backend {str(backend)!r} not available. Available: {devices.available_targets()}. "
            f"{target.name}: {found.reason}."
        )
    return {"device": target.name}


def _holding(here: Sequence[Target], tensors: Iterable[torch.Tensor]) -> Target:
    """Of several targets the one where the tensors are: they need not travel then."""
    kinds = {tensor.device.type for tensor in tensors}
    return next((one for one in here if kinds <= set(one.device_types)), here[0])


# --- what was asked -------------------------------------------------------------------------------


def _demand_arguments(fn: Any, seconds: Any) -> None:
    if not callable(fn):
        raise SettingError(f"fn={fn!r} cannot be called: give a module or a function.")
    if getattr(fn, "_compiled_call_impl", None) is not None:
        raise SettingError(
            f"{type(fn).__name__} was compiled in place (module.compile()): there is no uncompiled "
            f"baseline to compare with. Give a module that was not."
        )
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < float("inf"):
        raise SettingError(f"seconds={seconds!r}: give a number above 0.")


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise SettingError(
        f"inputs is of type {type(inputs).__name__}: give a tensor, a tuple of arguments, or a "
        f"dict of keyword arguments."
    )


def _listed(levels: Any) -> list[Any]:
    return [levels] if isinstance(levels, (str, int)) else list(levels)


def _demand_names(contestants: Sequence[Contestant]) -> None:
    names = [BASELINE, *(one.name for one in contestants)]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"two candidates have the name {name!r}: give another in also=.")


# --- what was found -------------------------------------------------------------------------------


def _candidate(entry: Entry) -> Candidate:
    numerics, samples = entry.numerics, entry.samples
    graphs = report(entry.fn) if entry.fn is not None and entry.name != BASELINE else Report()
    rows = [row for graph in graphs for row in graph.as_dict()["regions"]]
    return Candidate(
        name=entry.name,
        status=entry.status,
        reason=entry.reason,
        seconds=sorted(samples)[len(samples) // 2] if samples and entry.speedup else None,
        speedup=entry.speedup,
        error=numerics.error if numerics else None,
        bound=numerics.allowed if numerics else None,
        compile_seconds=entry.compile_s,
        computed_by=tuple(sorted({row["provider"] for row in rows})),
        samples=tuple(samples),
    )


def _cells(one: Candidate) -> tuple[str, ...]:
    ratio = one.speedup
    return (
        one.name,
        one.status,
        _duration(one.seconds),
        f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "",
        f"{one.error:.1e} / {one.bound:.1e}" if one.error is not None else "",
        f"{one.compile_seconds:.1f} s" if one.name != BASELINE and one.compile_seconds else "",
        ", ".join(one.computed_by),
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{seconds * scale:.3g} {unit}"
