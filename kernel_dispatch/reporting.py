"""What was done and why: one record per graph, counted while it runs, as objects, text or JSON."""

from __future__ import annotations

import contextlib
import json
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_dispatch import dynamo
from kernel_dispatch.callables import code_of, origin, reference, same
from kernel_dispatch.facts import GraphFacts
from kernel_dispatch.registry import policy
from kernel_dispatch.selection import Plan
from kernel_dispatch.settings import Settings
from lowering.contract import Region
from lowering.errors import StrictModeError, UnifiedWarning
from lowering.native import library
from lowering.reasons import Reason

# Lowered in an earlier process: only running shows what is in the graph.
_OUT_OF_A_CACHE = "(out of torch's cache: what was done to its weights is not known here)"


@dataclass(frozen=True)
class Fallback:
    """Something that was meant to happen and did not."""

    stage: str  # plan, compile, run
    provider: str  # who was meant to do it
    taken_by: str  # who did it instead
    reason: Reason
    error: str = ""  # the exception's class name

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "provider": self.provider,
            "taken_by": self.taken_by,
            "error": self.error,
            **self.reason.as_dict(),
        }


@dataclass(repr=False, eq=False)
class GraphReport:
    """Everything known of one compiled graph. `runs` and `runs_by_provider` are live counters."""

    index: int
    compile_id: str
    function: str
    settings: Settings
    facts: GraphFacts
    plan: Plan
    graph_break: Reason | None = None
    recompile_reason: str = ""
    provider: str = ""  # who computes the graph now
    regions: list[Region] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    transfers: int = 0
    guards: tuple[int, int] = (0, 0)  # that are pinned, and that are asked in each call beside them
    _runs: Counter[str] = field(default_factory=Counter)
    _region_runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    _kernel_runs: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _owner: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)
    _wrapper: Any = field(default=None, repr=False, compare=False)
    _code: types.CodeType | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.keeps_memory = self.settings.keep_memory != 0

    @property
    def target(self) -> str:
        return self.plan.target

    @property
    def level(self) -> str:
        return str(self.settings.level)

    @property
    def place(self) -> str:
        return self.facts.place

    @property
    def runs(self) -> int:
        """How often the graph was called and answered, whoever computed it."""
        return sum(self._runs.values())

    @property
    def runs_by_provider(self) -> dict[str, int]:
        return dict(self._runs)

    def ran(self, provider: str) -> None:
        with self._lock:
            self._runs[provider] += 1

    def region_ran(self, region: str, provider: str, times: int = 1) -> None:
        with self._lock:
            self._region_runs[region, provider] += times

    def kernels_ran(self, ran: int) -> None:
        """What of our C++ kernels ran in one call, as one number (`native/library.py`): calls of
        small graphs are short, and it is taken apart where somebody asks."""
        with self._lock:
            self._kernel_runs[ran] += 1

    @property
    def tolerance(self) -> float:
        return self.settings.tolerance

    def region_demoted(self, region: str, provider: str, reason: Reason) -> None:
        fell_back(self, "run", provider, "torch", reason)

    def region_runs(self, region: str, provider: str) -> int:
        return self._all_region_runs()[region, provider]

    def _all_region_runs(self) -> Counter[tuple[str, str]]:
        with self._lock:
            runs, calls = self._region_runs.copy(), self._kernel_runs.copy()
        for ran, often in calls.items():
            for region, times in library.regions_of(ran):
                runs[region] += times * often
        return runs

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "compile_id": self.compile_id,
            "function": self.function,
            "place": self.place,
            "target": self.target,
            "provider": self.provider,
            "planned_provider": self.plan.provider,
            "level": self.level,
            "settings": self.settings.as_dict(),
            "runs": self.runs,
            "runs_by_provider": self.runs_by_provider,
            "regions": self._regions_as_dicts(),
            "fallbacks": [fallback.as_dict() for fallback in self.fallbacks],
            "rejected": [rejection.as_dict() for rejection in self.plan.rejected],
            "graph_break": self.graph_break and self.graph_break.as_dict(),
            "recompile_reason": self.recompile_reason,
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
            "cache": dict(self.cache),
            "transfers": self.transfers,
            "guards": dict(zip(("pinned", "asked"), self.guards, strict=True)),
            "plan_fingerprint": self.plan.fingerprint(),
            "facts": self.facts.as_dict(),
        }

    def _regions_as_dicts(self) -> list[dict[str, Any]]:
        """The graph as a whole, then each region in it, with who ran it and how often."""
        whole = [
            {"region": "graph", "provider": who, "count": 1, "runs": n, "place": self.place}
            for who, n in (self._runs or {self.provider: 0}).items()
        ]
        parts = [self._region_as_dict(region) for region in self.regions]
        known = {(part.name, part.provider) for part in self.regions if not part.backward}
        # A graph out of torch's cache was lowered in an earlier process: only running shows what
        # is in it.
        calls = max(1, self.runs)
        unplanned = [
            {
                "region": name,
                "provider": who,
                "count": -(-n // calls),
                "runs": n,
                "place": self.place,
                "detail": _OUT_OF_A_CACHE,
                "packed_bytes": None,
            }
            for (name, who), n in self._all_region_runs().items()
            if (name, who) not in known
        ]
        return whole + parts + unplanned

    def _region_as_dict(self, region: Region) -> dict[str, Any]:
        return {
            "region": region.name,
            "provider": region.provider,
            "count": region.count,
            "runs": None
            if region.backward or region.left
            else self.region_runs(region.name, region.provider),
            "backward": region.backward,
            "left": region.left,
            "place": region.place,
            "detail": region.detail,
            "recipes": list(region.recipes),
            "packed_bytes": region.packed_bytes,
        }

    def text(self, verbose: bool = False) -> str:
        from kernel_dispatch.reporting_text import graph_text

        return graph_text(self, verbose)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<graph {self.compile_id} of {self.function}: {self.target}/{self.provider}>"

    def __getstate__(self) -> dict[str, Any]:
        """A report can be sent from a worker: without lock and the references into this process."""
        gone = ("_lock", "_owner", "_wrapper", "_code")
        return {name: value for name, value in self.__dict__.items() if name not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _owner=lambda: None)
        self._wrapper = self._code = None


class Report(list[GraphReport]):
    """A list of graph records that also prints: `print(kernel_dispatch.report())`."""

    def text(self, verbose: bool = False) -> str:
        from kernel_dispatch.reporting_text import report_text

        return report_text(self, verbose)

    def as_dict(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "graphs": [graph.as_dict() for graph in self]}

    def json(self, indent: int | None = 2) -> str:
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Report(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return self.text()

    @property
    def fallbacks(self) -> list[Fallback]:
        return [fallback for graph in self for fallback in graph.fallbacks]

    def __str__(self) -> str:
        return self.text()


_log: list[GraphReport] = []
_lock = threading.RLock()
_watchers: list[list[GraphReport]] = []  # lists that get every new record, whatever is cleared
_opened = 0
_KEPT = 4096  # a server that recompiles for months must not grow for ever
_warned_absent: set[str] = set()


def open_record(**fields: Any) -> GraphReport:
    """Start the record of one graph; `owner` is the callable given to torch.compile."""
    global _opened
    owner = fields.pop("owner", None)
    with _lock:
        record = GraphReport(index=_opened, **fields)
        _opened += 1
        record._owner, record._code = reference(owner), code_of(owner)
        record._wrapper = dynamo.wrapper_in_work()
        _log.append(record)
        for watcher in _watchers:
            watcher.append(record)
        del _log[:-_KEPT]
    return record


def report(compiled: Any = None) -> Report:
    """All graphs of this process, or those of one callable.

    `report(compiled)` gives the graphs of that compiled callable; `report(model)`, with the
    original model or function, those of all its compilations. Dynamo lets equal compilations of
    one piece of code share graphs (a second instance of a class, say): where no graph was compiled
    for this very callable, the shared ones are given.
    """
    with _lock:
        records = list(_log)
    if compiled is None:
        return Report(records)
    wanted, wrapper = origin(compiled), dynamo.wrapper_of(compiled)
    alike = [r for r in records if wrapper is None or r._wrapper == wrapper]
    own = [r for r in alike if same(r._owner(), wanted)]
    code = code_of(wanted) if wrapper is not None else None
    return Report(own or [r for r in alike if code is not None and r._code is code])


@contextlib.contextmanager
def watched(graphs: Report) -> Iterator[None]:
    """Every record that is opened inside the block also goes to `graphs`."""
    with _lock:
        _watchers.append(graphs)
    try:
        yield
    finally:
        with _lock:
            _watchers[:] = [watcher for watcher in _watchers if watcher is not graphs]


def clear() -> None:
    """Forget all graphs; torch.compiler.reset() calls this through the backend's reset."""
    with _lock:
        _log.clear()
        _warned_absent.clear()


def configured_otherwise(record: GraphReport, text: str) -> None:
    """configure() is in force around a graph that was compiled before, with something else."""
    if text not in record.notes:
        record.notes.append(text)
        warnings.warn(
            f"kernel_dispatch: graph {record.compile_id} of {record.function} was compiled before "
            f"this configure() block and keeps what it was compiled with: {text}. Give the setting "
            f"as options= to torch.compile, or call torch.compiler.reset() first.",
            UnifiedWarning,
            stacklevel=4,
        )


def chosen_otherwise(record: GraphReport, chosen: str | None) -> None:
    """set_default_backend() has chosen another provider since, which would make a difference here.

    Equal compilations of one piece of code share graphs, so it may be a new one that gets this.
    """
    kept, target = record.settings.provider, record.target
    if policy.effect(kept, target) == policy.effect(chosen, target):
        return
    text = f"compiled with {kept or 'no provider'} as the default, which is {chosen or 'none'} now"
    if text not in record.notes:
        record.notes.append(text)
        warnings.warn(
            f"kernel_dispatch: graph {record.compile_id} of {record.function} was {text}: it stays "
            f"as it is. torch.compiler.reset() makes everything be compiled anew.",
            UnifiedWarning,
            stacklevel=4,
        )


def withdraw(record: GraphReport) -> None:
    """Take back a record whose graph will never run."""
    with _lock:
        for graphs in (_log, *_watchers):
            graphs[:] = [other for other in graphs if other is not record]


def fell_back(
    record: GraphReport,
    stage: str,
    provider: str,
    taken_by: str,
    reason: Reason,
    error: BaseException | None = None,
) -> None:
    """The one way to fall back: recorded, warned of once, an error in strict mode."""
    name = type(error).__name__ if error is not None else ""
    fallback = Fallback(stage, provider, taken_by, reason, name)
    with _lock:
        seen = any((f.provider, f.reason.code) == (provider, reason.code) for f in record.fallbacks)
        record.fallbacks.append(fallback)
        if reason.code == "provider-absent":  # a fact of the machine: once, not for every graph
            seen = seen or provider in _warned_absent
            _warned_absent.add(provider)
    message = _message(record, fallback)
    if record.settings.strict:
        raise StrictModeError(f"{message} strict=True makes this an error.") from error
    if not seen:
        warnings.warn(
            f"{message} kernel_dispatch.report() has the details; strict=True makes this an error.",
            UnifiedWarning,
            stacklevel=3,
        )


def _message(record: GraphReport, fallback: Fallback) -> str:
    at = fallback.reason.place or record.place
    where = f"graph {record.compile_id} of {record.function}" + (f" ({at})" if at else "")
    wanted = f"{record.target}/{fallback.provider}"
    error = f"{fallback.error}: " if fallback.error else ""
    return (
        f"kernel_dispatch: {where}: {wanted} fell back to {fallback.taken_by} "
        f"[{fallback.reason.code}]: {error}{_first_lines(fallback.reason.text)}."
    )


def _first_lines(text: str, limit: int = 300) -> str:
    """Of what a compiler said, without the command line of a thousand letters before it."""
    text = " ".join((text.partition("\nOutput:\n")[2] or text).split())
    return (text if len(text) <= limit else text[: limit - 3] + "...").rstrip(".")


def warn_once(record: GraphReport, reason: Reason) -> None:
    """A warning that is not a fallback (yet), such as the recompile limit coming near."""
    record.notes.append(str(reason))
    warnings.warn(f"kernel_dispatch: {reason.text}", UnifiedWarning, stacklevel=3)


def missing_kernels(record: GraphReport, why: str) -> None:
    """A fact of the machine: in every report, and warned of once."""
    with _lock:
        seen = "kernels" in _warned_absent
        _warned_absent.add("kernels")
    record.notes.append(why)
    if not seen:
        warnings.warn(
            f"kernel_dispatch: {_first_lines(why)}. Graphs are computed without them; "
            f"`python -m kernel_dispatch doctor` has the details.",
            UnifiedWarning,
            stacklevel=3,
        )


def totals(graphs: Iterable[GraphReport]) -> dict[str, int]:
    """Runs per provider over several graphs."""
    count: Counter[str] = Counter()
    for graph in graphs:
        count.update(graph.runs_by_provider)
    return dict(count)
