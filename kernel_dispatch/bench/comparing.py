"""`bench compare A B`: what became slower, and is it more than noise?

Two runs on a shared machine differ in everything that the machine did meanwhile. So the default
compares each contender's time *relative to the baseline of its own run*. A row is slower only if it
lost more than the limit AND the confidence intervals of the two runs do not touch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.storing import BenchmarkFileError

BY = ("ratio", "time")

Key = tuple[str, str, str, str, bool]


@dataclass(frozen=True)
class Change:
    """One row in both runs. `factor` above 1: slower in the second."""

    workload: str
    contender: str
    factor: float
    apart: bool  # the intervals do not touch
    verdict: str  # "slower", "faster", "same", "gone", "new", "broken"
    text: str = ""


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]
    by: str
    limit: float
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """A row that is slower, and one that worked and does not any more."""
        return any(change.verdict in ("slower", "broken", "gone") for change in self.changes)


def compare(before: Run, after: Run, limit: float, by: str = "ratio") -> Comparison:
    """`limit`: 0.05 lets a row lose five percent."""
    old, new = _by_key(before), _by_key(after)
    if not old.keys() & new.keys():
        raise BenchmarkFileError(
            "the two files have no row in common: other workloads, contenders, devices or dtypes."
        )
    by = by if _has_ratios(old) and _has_ratios(new) else "time"
    shared = {key[0] for key in old} & {key[0] for key in new}
    keys = [key for key in {**old, **new} if key[0] in shared]
    changes = [_change(old.get(key), new.get(key), limit, by) for key in keys]
    return Comparison(tuple(changes), by, limit, tuple(_notes(before, after, old, new, limit, by)))


def _by_key(run: Run) -> dict[Key, Row]:
    return {(r.workload, r.contender, r.device, r.dtype, r.training): r for r in run.rows}


def _has_ratios(rows: dict[Key, Row]) -> bool:
    return any(row.speedup is not None for row in rows.values())


def _change(old: Row | None, new: Row | None, limit: float, by: str) -> Change:
    some = new or old
    assert some is not None
    if old is None or new is None:
        verdict = "new" if old is None else "gone" if old.status == "ok" else "same"
        where = "not in the first file" if old is None else "not in the second file"
        return Change(some.workload, some.contender, 1.0, False, verdict, where)
    if old.times is None or new.times is None:
        broken = old.times is not None
        verdict = "broken" if broken else "same" if new.times is None else "new"
        text = f"{old.status} before, {new.status} now" + (f": {new.reason}" if new.reason else "")
        return Change(some.workload, some.contender, 1.0, False, verdict, text)
    if old.speedup is None or new.speedup is None:
        by = "time"
    (low, was, high), (new_low, now, new_high) = _interval(old, by), _interval(new, by)
    factor = now / was
    apart = new_low > high or new_high < low
    verdict = "same"
    if apart and factor > 1 + limit:
        verdict = "slower"
    elif apart and factor < 1 / (1 + limit):
        verdict = "faster"
    return Change(some.workload, some.contender, factor, apart, verdict)


def _interval(row: Row, by: str) -> tuple[float, float, float]:
    """Low, middle and high of what is compared; larger is slower."""
    if by == "ratio" and row.speedup is not None:
        speedup = row.speedup
        return 1 / speedup.high, 1 / speedup.value, 1 / speedup.low
    assert row.times is not None
    return row.times.low, row.times.median, row.times.high


def _notes(
    before: Run, after: Run, old: dict[Key, Row], new: dict[Key, Row], limit: float, by: str
) -> Iterator[str]:
    for name in ("cpu", "threads", "torch", "cpu_capability"):
        one, other = before.machine.get(name), after.machine.get(name)
        if None not in (one, other) and not isinstance(one, dict) and one != other:
            yield f"{name} differs: {one} before, {other} now"
    for one, other, where in ((before, after, "first"), (after, before, "second")):
        if alone := [name for name in one.workloads() if name not in other.workloads()]:
            yield f"only in the {where} file, not compared: {', '.join(alone)}"
    drift = [
        _interval(new[key], "time")[1] / _interval(old[key], "time")[1]
        for key in old.keys() & new.keys()
        if key[1] == before.baseline and old[key].times and new[key].times
    ]
    if by == "ratio" and drift:
        factor = statistics.median(drift)
        text = f"the baseline itself ({before.baseline}) took {factor:.2f} x its time"
        yield text + ("; --by time compares seconds" if abs(factor - 1) > limit else "")
