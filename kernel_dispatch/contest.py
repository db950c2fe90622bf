"""Candidates for one call: each is verified, then all that were right are timed, in turns.

Nothing is timed that was not verified, and whatever goes wrong becomes a row with its reason.
"""

from __future__ import annotations

import gc
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernel_dispatch.bench import estimates
from kernel_dispatch.bench.checking import Bound, Truth, WrongResult, check, establish
from kernel_dispatch.bench.compiling import Compiles, Recompiled
from kernel_dispatch.bench.results import BASELINE, Numerics, Speedup
from kernel_dispatch.rehearsing import (
    CannotRehearse,
    Rehearsal,
    Rehearsed,
    Unchanged,
    rehearsed,
    state_of,
)
from lowering.errors import UnifiedWarning

Clock = Callable[[], float]
Function = Callable[..., Any]

MIN_ROUNDS, MAX_ROUNDS = 7, 60
_WARM_UP_CALLS = 8  # of a candidate that compiles again and again, before it is given up
_SAMPLE_S = 0.002  # a sample repeats short calls until it lasts this long: clocks are coarse
_SHORTEST_CALL_S = 2e-6
# Where eager itself is this far from float64, twice its error would let anything pass.
_TOO_FAR_TO_JUDGE = 0.1


@dataclass(frozen=True)
class Limit(Bound):
    """A bound that `also` may widen, and never narrow: what a level may give away on purpose."""

    also: float = 0.0

    def of(self, eagers: float, eps: float, has_reference: bool) -> float:
        return max(super().of(eagers, eps, has_reference), self.also)


@dataclass(frozen=True)
class Contestant:
    """`make` gives what is called instead of the user's function."""

    name: str
    make: Callable[[Function], Function]
    limit: Limit = field(default_factory=Limit)


@dataclass
class Entry:
    """A contestant on its way; `status` empty: still in it."""

    name: str
    fn: Function | None = None
    status: str = ""
    reason: str = ""
    numerics: Numerics | None = None
    compile_s: float = 0.0
    call_s: float = 0.0
    calls: int = 1
    samples: list[float] = field(default_factory=list)
    speedup: Speedup | None = None
    rehearsal: Rehearsal | None = None
    limit: Limit = field(default_factory=Limit)

    def out(self, status: str, reason: str) -> None:
        self.status, self.reason = status, "; ".join(filter(None, [reason, self.reason]))
        self.rehearsal = None


class Contest:
    """One function with its inputs; `run` gives the entries, the baseline first."""

    def __init__(
        self,
        fn: Function,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        module: torch.nn.Module | None,
        seconds: float,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._fn, self._inputs, self._module = fn, inputs, module
        self._seconds, self._clock = seconds, clock
        self._compiles = Compiles(dynamo=True)
        self._known: Rehearsed | None = None
        self.truth: Truth | None = None
        self.eagers: Any = None  # what eager returned, for its structure
        self.training = False

    def run(self, contestants: Sequence[Contestant]) -> list[Entry]:
        """Every entry ends with a status; one is "fastest"."""
        baseline = Entry(BASELINE, self._fn)
        entries = [baseline, *(Entry(one.name, limit=one.limit) for one in contestants)]
        with self._left_as_it_was():
            why_not = self._establish()
            if not why_not:
                self._enter(baseline, lambda fn: fn)
                why_not = baseline.reason if baseline.status else ""
            if why_not:
                for entry in entries[1:]:
                    entry.out("unverified", why_not)
                baseline.status, baseline.reason = "fastest", why_not
                return entries
            for entry, contestant in zip(entries[1:], contestants, strict=True):
                self._enter(entry, contestant.make)
            self._rounds([entry for entry in entries if not entry.status])
        _judge(entries)
        return entries

    # --- the truth --------------------------------------------------------------------------------

    def _establish(self) -> str:
        """Why nothing can be verified; empty if it can. The user's own error is raised."""
        try:
            self._known = rehearsed(self._fn, self._inputs)
        except CannotRehearse as error:
            return str(error)
        step = self._known.step
        self.eagers = step.run()[0]
        self.training = step.training
        try:
            truth = establish(step)  # type: ignore[arg-type]  # a Step in all that it is asked
        except WrongResult as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  (it ran before: comparing is what fails)
            return f"its results cannot be compared: {one_line(error)}"
        if truth.random:
            return "its results are random, so that no other way to them can be verified"
        if not truth.repeatable:
            return (
                "two calls from the same weights and inputs differ: it keeps state elsewhere, "
                "which cannot be put back"
            )
        if max(truth.errors, default=0.0) > _TOO_FAR_TO_JUDGE:
            return (
                f"eager's own error against float64 is {max(truth.errors):.1e}, so that no bound "
                f"would tell a right result from a wrong one"
            )
        self.truth = truth
        return ""

    # --- one contestant ---------------------------------------------------------------------------

    def _enter(self, entry: Entry, make: Callable[[Function], Function]) -> None:
        """Compile, verify, warm up; what is not right is out."""
        try:
            with _what_is_said() as said:
                start = self._clock()
                entry.fn = make(self._fn)
                entry.rehearsal = self._rehearsal(entry.fn)
                entry.numerics = self._verified(entry, entry.rehearsal)
                entry.compile_s = self._clock() - start
                self._warm_up(entry, entry.rehearsal)
            entry.reason = said()
        except WrongResult as error:
            entry.out("wrong", str(error))
        except Recompiled as error:
            entry.out("recompiled", str(error))
        except Exception as error:
            if entry.name == BASELINE:
                raise
            entry.out("failed", one_line(error))

    def _rehearsal(self, fn: Function) -> Rehearsal:
        known = self._known
        assert known is not None
        return Rehearsal(fn, self._inputs, self._module, known.written, known.before, known.others)

    def _verified(self, entry: Entry, rehearsal: Rehearsal) -> Numerics | None:
        assert self.truth is not None and self._known is not None
        unchanged = Unchanged(rehearsal, self._known.written)
        torch.manual_seed(1)
        results = rehearsal.run()
        if (position := unchanged.broken()) is not None:
            raise WrongResult(f"it writes into {self._name_of(position)}, which eager leaves alone")
        _demand_structure(results[0], self.eagers)
        return check(results, self.truth, entry.limit)

    def _name_of(self, position: int) -> str:
        module = self._module
        names = [] if module is None else [*dict(module.named_parameters())]
        names += [] if module is None else [*dict(module.named_buffers())]
        if position < len(names):
            return names[position]
        return f"input tensor {position - len(names)}"

    def _warm_up(self, entry: Entry, rehearsal: Rehearsal) -> None:
        """Until two calls in a row compile nothing; then how long one takes."""
        quiet, times = 0, []
        for _ in range(_WARM_UP_CALLS):
            before = self._compiles.count()
            times.append(self._timed(rehearsal, 1))
            quiet = 0 if self._compiles.count() > before else quiet + 1
            if quiet == 2:
                entry.call_s = min(times[-2:])
                often = math.ceil(_SAMPLE_S / max(entry.call_s, _SHORTEST_CALL_S))
                entry.calls = 1 if rehearsal.writes() else often
                return
        raise Recompiled(f"it compiles again in every call{self._compiles.reason()}")

    # --- timing -----------------------------------------------------------------------------------

    def _rounds(self, entries: list[Entry]) -> None:
        """Each round calls everyone once, in another order: what slows the machine down for a
        second slows all of them."""
        a_round = sum(entry.call_s * entry.calls for entry in entries)
        count = int(self._seconds / max(a_round, 1e-9))
        shuffle = random.Random(0).shuffle
        for _ in range(max(MIN_ROUNDS, min(MAX_ROUNDS, count))):
            order = [entry for entry in entries if not entry.status]
            shuffle(order)
            for entry in order:
                self._sample(entry)
        for entry in entries:
            if not entry.status and entry.name != BASELINE:
                self._verified_again(entry)

    def _sample(self, entry: Entry) -> None:
        assert entry.rehearsal is not None
        before = self._compiles.count()
        try:
            entry.samples.append(self._timed(entry.rehearsal, entry.calls))
        except Exception as error:
            if entry.name == BASELINE:
                raise
            entry.out("failed", f"while it was timed: {one_line(error)}")
            return
        # Of the baseline it is somebody else's compilation, or the function's own.
        if self._compiles.count() > before and entry.name != BASELINE:
            entry.out("recompiled", f"while it was timed{self._compiles.reason()}")

    def _verified_again(self, entry: Entry) -> None:
        """After many calls it has to be as right as after the first."""
        assert entry.rehearsal is not None
        try:
            self._verified(entry, entry.rehearsal)
        except WrongResult as error:
            entry.out("wrong", f"after it was timed: {error}")
        except Exception as error:  # noqa: BLE001  (a candidate may raise anything)
            entry.out("failed", f"after it was timed: {one_line(error)}")

    def _timed(self, rehearsal: Rehearsal, calls: int) -> float:
        """Seconds per call, until the devices are done. What is written is put back before."""
        rehearsal.put_back()
        devices = sorted({tensor.device for tensor in rehearsal.tensors()}, key=str)
        _wait(devices)
        was_on = gc.isenabled()
        gc.disable()
        try:
            start = self._clock()
            for _ in range(calls):
                rehearsal.call()
            _wait(devices)
            return (self._clock() - start) / calls
        finally:
            if was_on:
                gc.enable()

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Generators, and the weights and buffers that the function writes into."""
        tensors = [t for t in state_of(self._module, self._inputs) if t.device.type == "cuda"]
        with torch.random.fork_rng(devices=sorted({t.device.index for t in tensors})):
            try:
                yield
            finally:
                if self._known is not None and self._known.written:
                    self._rehearsal(self._fn).put_back()


def _judge(entries: Sequence[Entry]) -> None:
    """The smallest median wins; it has to beat the baseline in pairs of one round each as well."""
    baseline = entries[0]
    timed = [entry for entry in entries if not entry.status]
    for entry in timed:
        entry.speedup = estimates.speedup(baseline.samples, entry.samples)
    medians = {e.name: estimates.times(e.samples, e.calls).median for e in timed}
    faster = [e for e in timed if e.speedup and e.speedup.value > 1]
    faster = [e for e in faster if medians[e.name] < medians[BASELINE]]
    best = min(faster, key=lambda e: medians[e.name], default=baseline)
    for entry in timed:
        entry.status = "fastest" if entry is best else "slower"
        if entry is not best:
            entry.reason = "; ".join(filter(None, [_slower(entry, best, medians), entry.reason]))


def _slower(entry: Entry, best: Entry, medians: Mapping[str, float]) -> str:
    times = medians[entry.name] / medians[best.name]
    if times >= 1:
        return f"takes {times:.2f} times as long as {best.name}"
    assert entry.speedup is not None
    return (
        f"its median is smaller, but round by round it was not faster than {BASELINE} "
        f"({entry.speedup.value:.2f})"
    )


def _demand_structure(got: Any, eagers: Any) -> None:
    """The same containers, and the same values where they are no tensors."""
    mine, own = pytree.tree_structure(got), pytree.tree_structure(eagers)
    if mine != own:
        raise WrongResult(f"its results are {mine}, eager's are {own}")
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(eagers), strict=True):
        if not isinstance(other, torch.Tensor) and not _same_value(one, other):
            raise WrongResult(f"it returns {one!r} where eager returns {other!r}")


def _same_value(one: Any, other: Any) -> bool:
    """Numbers to within float32's rounding; what cannot be compared counts as the same."""
    if not isinstance(other, (int, float, str)):
        return type(one) is type(other)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or (one != one and other != other)
    return type(one) is type(other) and one == other


@contextmanager
def _what_is_said() -> Iterator[Callable[[], str]]:
    """Our own warnings are the row's reason and not the caller's concern."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnifiedWarning)
        yield lambda: "; ".join(
            dict.fromkeys(
                " ".join(str(one.message).split())[:300]
                for one in caught
                if issubclass(one.category, UnifiedWarning)
            )
        )
    for other in caught:
        if not issubclass(other.category, UnifiedWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "xla":
            import torch_xla

            torch_xla.sync(wait=True)
        elif device.type != "cpu":
            getattr(torch, device.type).synchronize()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    shown = text if len(text) <= 300 else text[:300] + " ..."
    return f"{type(error).__name__}: {shown}".rstrip(": ")
