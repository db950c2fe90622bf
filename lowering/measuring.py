"""Measures a machine profile within a budget of seconds, and shares its stopwatch.

Candidates of a group (kind, dtype, shape) take turns, so that a busy moment of the machine falls on
all of them, and the median counts. Groups are measured in order of use and share what is left of
the budget; what does not fit is noted and left out. `calibration` in kernel_dispatch decides when
this runs and where the result is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowering import candidates, machine
from lowering.candidates import CANDIDATES, Prepare, Run
from lowering.native import library
from lowering.profile import MOST_BUSY, SHAPES, Conditions, MachineProfile, RateKey

BUDGET_S = 3.0
READ_BYTES = 512 << 20  # past every cache
_BYTES_PER_SECOND = 85 << 20  # of budget: a new buffer costs page faults, which are slow
_LEAST_BYTES = 64 << 20  # below it, some machines answer from their cache
_REPEATS = 5
_MOST_ROUNDS, _LEAST_ROUNDS = 15, 3
_CALLS = 100
_KEPT_BYTES = 64 << 20
_GLANCE_S = 0.25  # schedulers favour who has just woken up, for some slices of milliseconds
_ENOUGH_S = 0.05  # of timed seconds, to tell how busy others are
_LARGEST_SHARE = 0.25  # of what is left, for a single call that can be foreseen to be slow

Clock = Callable[[], float]


def conditions(threads: int | None = None) -> Conditions:
    """What a profile of this process holds for."""
    cpu = machine.cpu()
    return Conditions(
        cpu=cpu.model,
        vendor=cpu.vendor,
        isa=tuple(sorted(cpu.isa)),
        cores=cpu.effective_cores,
        threads=torch.get_num_threads() if threads is None else threads,
        torch=str(torch.__version__),
        candidates=hashlib.sha256(candidates.described().encode()).hexdigest()[:16],
    )


def measure(
    budget: float = BUDGET_S,
    table: Mapping[RateKey, Prepare] | None = None,
    clock: Clock = time.perf_counter,
    give_up: bool = False,
) -> MachineProfile:
    """This machine with the thread count of this thread. Takes about the budget, rarely more; with
    `give_up` less, where other processes disturb it so much that nobody will use the result."""
    run = _Measurement(budget, clock, give_up)
    with torch.no_grad():
        read, copy = run.bandwidths()
        call_us = run.call_overhead()
        # Page faults would hit the one or the other by chance; graphs that are compiled have none.
        with library.keeping_memory(_KEPT_BYTES):
            run.groups(CANDIDATES if table is None else table)
    return MachineProfile(
        conditions=conditions(),
        rates=run.rates,
        read_gbs=read / 1e9,
        copy_gbs=copy / 1e9,
        call_us=call_us,
        busy=run.busy(),
        seconds=clock() - run.start,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        notes=tuple(run.notes),
    )


def glance() -> float:
    """The share of a moment that other processes took from us, before much time is spent."""
    run = _Measurement(_GLANCE_S, time.perf_counter)
    a = torch.ones(256, 256)
    with torch.no_grad():
        torch.mm(a, a)
        while run.left() > 0 and not run.hopeless():
            run.seconds_of(lambda: torch.mm(a, a))
    return run.busy()


# --- the stopwatch, for the benchmark's limits as well --------------------------------------------


def best_seconds(
    run: Callable[[], Any],
    wait: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> float | None:
    """The best of several runs; None where it does not run at all: one library less, no reason to
    stop. `wait` returns when the device has done what it was told."""
    best = float("inf")
    try:
        run()
        wait()
        for _ in range(_REPEATS):
            start = clock()
            run()
            wait()
            best = min(best, clock() - start)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return best


def buffer(size: int, device: str = "cpu") -> torch.Tensor:
    """Memory that was written once: untouched pages would be read from one page of zeros."""
    return torch.ones(size // 4, dtype=torch.float32, device=device)


def best_rate(
    amount: float,
    run: Callable[[], Any],
    wait: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> float:
    """What a call computes or moves, per second; 0 where it does not run."""
    seconds = best_seconds(run, wait, clock)
    return amount / seconds if seconds else 0.0


# --- one measurement ------------------------------------------------------------------------------


@dataclass
class _Measurement:
    """Collects rates and notes until the budget is spent."""

    budget: float
    clock: Clock
    give_up: bool = False
    rates: dict[RateKey, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    start: float = 0.0
    timed: float = 0.0  # seconds in candidates, and how much of them this thread really ran
    ran: float = 0.0
    scheduled: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.start, self.scheduled = self.clock(), _scheduled()

    def left(self) -> float:
        return self.start + self.budget - self.clock()

    def note(self, text: str) -> None:
        self.notes[text] = None

    def busy(self) -> float:
        """The share of time that other processes took from us.

        Where the scheduler does not tell it is guessed: a thread that computes, or spins until the
        others are done, runs all the time, unless somebody else has its core.
        """
        if self.scheduled and (now := _scheduled()):
            ran, waited = now[0] - self.scheduled[0], now[1] - self.scheduled[1]
            return max(0.0, waited / (ran + waited)) if ran > 0 else 0.0
        return min(1.0, max(0.0, 1 - self.ran / self.timed)) if self.timed else 0.0

    def hopeless(self) -> bool:
        return self.timed > _ENOUGH_S and self.busy() > MOST_BUSY

    def bandwidths(self) -> tuple[float, float]:
        """Bytes per second, read and copied; a copy counts what it reads and what it writes."""
        cpu = machine.cpu()
        memory = cpu.memory_limit_bytes or cpu.memory_bytes or READ_BYTES
        size = min(READ_BYTES, int(self.budget * _BYTES_PER_SECOND), memory // 16)
        if size < _LEAST_BYTES:
            self.note("bandwidth: not measured, the budget or the memory is too small")
            return 0.0, 0.0
        whole = buffer(size)
        lower, upper = whole.chunk(2)

        def rate(run: Run) -> float:
            return best_rate(whole.nbytes, lambda: self.seconds_of(run), clock=self.clock)

        return rate(whole.sum), rate(lambda: upper.copy_(lower))

    def call_overhead(self) -> float:
        """Microseconds of a call that has next to nothing to compute."""
        one = torch.ones(1)

        def calls() -> None:
            for _ in range(_CALLS):
                torch.neg(one)

        return (best_seconds(calls, clock=self.clock) or 0.0) / _CALLS * 1e6

    def groups(self, table: Mapping[RateKey, Prepare]) -> None:
        grouped: dict[tuple[str, str, str], list[RateKey]] = {}
        for key in sorted(table, key=_order):
            grouped.setdefault((key.kind, key.dtype, key.shape), []).append(key)
        for done, ((kind, dtype, shape), keys) in enumerate(grouped.items()):
            if self.left() <= 0:
                self.note(f"{kind} {dtype} {shape}: not measured, the budget was spent")
                continue
            if self.give_up and self.hopeless():
                self.note("given up: other processes are busy")
                return
            share = self.left() / (len(grouped) - done)
            try:
                problem = candidates.problem(kind, dtype, shape, torch.get_num_threads())
            except (RuntimeError, MemoryError) as error:  # out of memory, or a dtype is missing
                self.note(f"{kind} {dtype} {shape}: {_first_line(error)}")
                continue
            self._group(problem, {key: table[key] for key in keys}, share)

    def _group(self, problem: Any, prepares: Mapping[RateKey, Prepare], share: float) -> None:
        start = self.clock()
        samples: dict[RateKey, list[float]] = {}
        runs: dict[RateKey, Run] = {}
        for key, prepare in prepares.items():
            if self._foreseeably_slow(key, problem.flops) or self.left() <= 0:
                continue
            try:
                run = prepare(problem)
                if run is None:
                    self.note(f"{_who(key)}: not here")
                    continue
                first = self.seconds_of(run)
            except Exception as error:  # noqa: BLE001  (a library that cannot is not measured)
                self.note(f"{_who(key)}: {_first_line(error)}")
                continue
            if first > self.left() * _LARGEST_SHARE:
                samples[key] = [first]
                self.note(f"{_who(key)} {key.shape}: one call only, it took {first:.2g} s")
            else:
                runs[key] = run
        self._rounds(runs, samples, start + share)
        for key, taken in samples.items():
            self.rates[key] = problem.flops / max(statistics.median(taken), 1e-9) / 1e9

    def _rounds(
        self, runs: Mapping[RateKey, Run], samples: dict[RateKey, list[float]], deadline: float
    ) -> None:
        order = list(runs)
        for done in range(_MOST_ROUNDS):
            if done and self.left() <= 0:
                return
            if done >= _LEAST_ROUNDS and self.clock() > deadline:
                return
            for key in order:
                samples.setdefault(key, []).append(self.seconds_of(runs[key]))
            order = order[1:] + order[:1]  # nobody always follows the same other one

    def seconds_of(self, run: Run) -> float:
        start, ran = self.clock(), time.thread_time()
        run()
        seconds = self.clock() - start
        self.timed += seconds
        self.ran += time.thread_time() - ran
        return seconds

    def _foreseeably_slow(self, key: RateKey, flops: int) -> bool:
        """A dtype that a CPU emulates can take seconds for one call: the small problems tell."""
        rates = [self.rates.get(key._replace(shape=shape), 0.0) for shape in SHAPES[key.kind]]
        expected = flops / max(rates) / 1e9 if any(rates) else 0.0
        if expected <= self.left() * _LARGEST_SHARE:
            return False
        self.note(f"{_who(key)} {key.shape}: left out, one call would take {expected:.2g} s")
        return True


def _scheduled() -> tuple[int, int] | None:
    """Nanoseconds that the threads of this process ran, and that they waited for a core; None where
    the system does not say (it is Linux that does)."""
    ran = waited = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                times = (task / "schedstat").read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    except (OSError, ValueError, IndexError):
        return None
    return (ran, waited) if ran else None


_KINDS, _DTYPES = tuple(SHAPES), ("float32", "bfloat16", "float16")


def _order(key: RateKey) -> tuple[int, int, int, str]:
    """Most used first, and in a kind from the cheapest shape to the dearest."""
    return (
        _place(_DTYPES, key.dtype),
        _place(_KINDS, key.kind),
        _place(SHAPES[key.kind], key.shape),
        key.provider,
    )


def _place(known: Iterable[str], name: str) -> int:
    names = [*known, name]
    return names.index(name)


def _who(key: RateKey) -> str:
    return f"{key.kind} {key.dtype} by {key.provider}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
