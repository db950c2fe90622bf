"""How each contender did over many workloads: how often it passed, and its mean speed-up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernel_dispatch.bench.results import Row

Case = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Standing:
    """`common` is over the cases in which every compared contender has a speed-up; `own` over all
    in which this one has, so two contenders' `own` may be over different cases."""

    contender: str
    rows: int
    statuses: Mapping[str, int]
    own: float | None
    own_cases: int
    common: float | None

    @property
    def passed(self) -> int:
        return self.statuses.get("ok", 0)


@dataclass(frozen=True)
class Standings:
    standings: tuple[Standing, ...]
    common_cases: tuple[Case, ...]


def standings(rows: Sequence[Row], baseline: str) -> Standings:
    """A contender without any speed-up is counted, but does not empty the others' common cases."""
    names = list(dict.fromkeys(row.contender for row in rows))
    values = {name: _speedups(rows, name) for name in names}
    compared = [values[name] for name in names if name != baseline and values[name]]
    common = [case for case in dict.fromkeys(map(case_of, rows)) if _in_all(case, compared)]
    return Standings(
        tuple(_standing(rows, name, values[name], common) for name in names), tuple(common)
    )


def case_of(row: Row) -> Case:
    return (row.workload, row.dtype, row.device, row.training)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def usable_speedup(row: Row) -> float | None:
    """None unless the row passed and its speed-up is a positive number."""
    if row.status != "ok" or row.speedup is None:
        return None
    value = row.speedup.value
    return value if math.isfinite(value) and value > 0 else None


def _speedups(rows: Sequence[Row], contender: str) -> dict[Case, float]:
    found = ((case_of(row), usable_speedup(row)) for row in rows if row.contender == contender)
    return {case: value for case, value in found if value is not None}


def _in_all(case: Case, compared: Sequence[Mapping[Case, float]]) -> bool:
    return bool(compared) and all(case in values for values in compared)


def _standing(
    rows: Sequence[Row], name: str, values: Mapping[Case, float], common: Sequence[Case]
) -> Standing:
    statuses = Counter(row.status for row in rows if row.contender == name)
    return Standing(
        contender=name,
        rows=sum(statuses.values()),
        statuses=dict(statuses),
        own=geometric_mean(values.values()),
        own_cases=len(values),
        common=geometric_mean(values[case] for case in common if case in values),
    )
