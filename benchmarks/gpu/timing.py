"""How long does the device work, how long does the caller wait, and how much memory does it take?

Device time: the call is captured in a CUDA graph, so what the host does is not in it. Before every
replay a buffer larger than the L2 cache is written, without waiting for it: the start event, the
replay and the end event queue up behind that write, so the gap before the kernel is the device's
own. Contenders take turns within a round, in reversed order every other round: what the card's
clock does, it does to all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernel_dispatch.bench import estimates
from kernel_dispatch.bench.device import PeakMemory, give_back_memory

Call = Callable[[], Any]
Samples = dict[str, list[float]]
GRAPH, EVENTS, WALL = "cuda graph", "events", "wall clock"
_MOST_ROUNDS, _LEAST_ROUNDS = 101, 11
_CAPTURE_AFTER = 3  # calls that compile, allocate and tune


@dataclass(frozen=True)
class Summary:
    """Of the samples of one contender, in microseconds; low and high bound the median (95%)."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Summary:
        found = estimates.times(seconds, 1)
        micro = (round(1e6 * x, 3) for x in (found.median, found.low, found.high))
        return cls(*micro, len(seconds))


class Clock:
    """Wall-clock time of the CPU: to run through the script where there is no GPU."""

    how = WALL
    # A capture that failed leaves torch's allocator as if it went on: the row can be finished, but
    # the next ones belong into another process.
    spoilt = False

    def __init__(self, quick: bool) -> None:
        self._budget = 0.6  # seconds for all rounds of one row
        self._least, self._most = (3, 3) if quick else (_LEAST_ROUNDS, _MOST_ROUNDS)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What is timed is prepared and called in here."""
        yield

    def ready(self, call: Call) -> tuple[Call, str]:
        """What is timed in place of the call, and how."""
        call()
        return call, self.how

    def seconds(self, replays: Mapping[str, Call]) -> Samples:
        """Samples of all contenders, in turns."""
        once = self._round(replays, False)
        rounds = self._rounds(sum(once.values()))
        found: Samples = {name: [] for name in replays}
        for number in range(rounds):
            for name, value in self._round(replays, bool(number % 2)).items():
                found[name].append(value)
        return found

    def _round(self, replays: Mapping[str, Call], reverse: bool) -> dict[str, float]:
        found = {}
        for name, call in ordered(replays, reverse):
            start = time.perf_counter()
            call()
            found[name] = time.perf_counter() - start
        return found

    def _rounds(self, seconds: float) -> int:
        fitting = int(self._budget / max(seconds, 1e-7))
        return max(self._least, min(self._most, fitting | 1))

    def wait(self) -> None:
        pass

    def waiting(self, calls: Mapping[str, Call]) -> dict[str, tuple[list[float], list[float]]]:
        """Per contender: seconds until the call returns, and until the device is done."""
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
        for number in range(self._rounds(self._wall_of_all(calls))):
            for name, call in ordered(calls, bool(number % 2)):
                self.wait()
                start = time.perf_counter()
                call()
                returned = time.perf_counter()
                self.wait()
                found[name][0].append(returned - start)
                found[name][1].append(time.perf_counter() - start)
        return found

    def _wall_of_all(self, calls: Mapping[str, Call]) -> float:
        self.wait()
        start = time.perf_counter()
        for call in calls.values():
            call()
        self.wait()
        return time.perf_counter() - start


class GpuClock(Clock):
    """CUDA graphs and events; also for ROCm, which torch gives the same names."""

    how = GRAPH

    def __init__(self, device: str, quick: bool) -> None:
        super().__init__(quick)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        # Long enough to write that the host has queued everything behind it meanwhile.
        self._other = torch.empty(max(256 << 20, 4 * l2), dtype=torch.uint8, device=device)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """A stream of its own: graphs cannot be captured on the default one, and a backward runs
        on the stream of its forward."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def ready(self, call: Call) -> tuple[Call, str]:
        for _ in range(_CAPTURE_AFTER):
            call()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                call()
        except Exception:  # noqa: BLE001  (it waits for the device, or allocates where it must not)
            Clock.spoilt = True
            self.wait()
            return call, EVENTS
        graph.replay()
        self.wait()
        return graph.replay, GRAPH

    def seconds(self, replays: Mapping[str, Call]) -> Samples:
        (estimate,) = self._queued(replays, 1)
        rounds = self._rounds(sum(estimate.values()) + len(replays) * 1e-4)
        found: Samples = {name: [] for name in replays}
        for one in self._queued(replays, rounds):
            for name, value in one.items():
                found[name].append(value)
        return found

    def _queued(self, replays: Mapping[str, Call], rounds: int) -> list[dict[str, float]]:
        """All rounds are queued, then waited for once."""
        pairs = []
        for number in range(rounds):
            for name, replay in ordered(replays, bool(number % 2)):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._other.zero_()
                begin.record(self._stream)
                replay()
                end.record(self._stream)
                pairs.append((number, name, begin, end))
        self.wait()
        found: list[dict[str, float]] = [{} for _ in range(rounds)]
        for number, name, begin, end in pairs:
            found[number][name] = begin.elapsed_time(end) / 1e3
        return found

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock(device: str, quick: bool) -> Clock:
    return Clock(quick) if device == "cpu" else GpuClock(device, quick)


def ordered(calls: Mapping[str, Call], reverse: bool) -> list[tuple[str, Call]]:
    return list(reversed(calls.items())) if reverse else list(calls.items())


def milliseconds(watch: Clock, call: Call) -> float:
    """The median, alone: for tuning."""
    with watch.here():
        replay, _ = watch.ready(call)
        return 1e3 * statistics.median(watch.seconds({"": replay})[""])


def peak_bytes(call: Call, device: str) -> int | None:
    """Above what was there before it, with nothing cached."""
    give_back_memory()
    memory = PeakMemory(device)
    call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return memory.bytes()


# --- what this card reaches -----------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Measured, not from a data sheet: what shares in the tables are of."""

    copy: float  # bytes per second, read and written both counted
    product: float  # FLOP/s of a large product in bfloat16

    @classmethod
    def measure(cls, device: str, quick: bool) -> Rates:
        numbers, side = (1 << 16, 64) if quick else (1 << 29, 8192)
        source = torch.ones(numbers, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
        watch = clock(device, quick)
        calls = {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b)}
        with watch.here(), torch.no_grad():
            samples = watch.seconds({name: watch.ready(call)[0] for name, call in calls.items()})
        copying, multiplying = (statistics.median(samples[name]) for name in calls)
        return cls(2 * source.nbytes / copying, 2 * side**3 / multiplying)
