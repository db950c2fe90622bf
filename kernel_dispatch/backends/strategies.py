"""What a vendor's target can do, out of the capability rows that the compiler itself chooses by."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kernel_dispatch import calibration, devices
from kernel_dispatch.backends.levels import OptimizationLevel
from kernel_dispatch.backends.results import OptimizationStrategy
from lowering import providers
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Target
from lowering.profile import MachineProfile

# Region -> what a machine profile calls its rates.
_MEASURED = {"linear": "gemm", "convolution": "conv"}


def of(target: Target) -> list[OptimizationStrategy]:
    """One strategy for each (region, provider); where the target is here, those that work here."""
    rows: dict[str, list[CapabilityRow]] = {}
    for row in target.rows:
        if _does_something(row) and _possible(row, target):
            rows.setdefault(f"{row.region}:{row.provider}", []).append(row)
    profile = calibration.current() if target.name == "cpu" else None
    return [_strategy(name, of_name, profile) for name, of_name in rows.items()]


def _does_something(row: CapabilityRow) -> bool:
    """Eager is what was there before; a row may also say who is left alone."""
    if row.provider == "eager":
        return False
    return row.region == GRAPH or providers.maker(row).emit is not None


def _possible(row: CapabilityRow, target: Target) -> bool:
    found = devices.probe(target)
    if not found.available:
        return True  # nobody knows what the device would have
    here = row.features <= frozenset(found.details.get("features", ()))
    return here and not any(devices.absent(name) for name in (row.provider, *sorted(row.needs)))


def _strategy(
    name: str, rows: list[CapabilityRow], profile: MachineProfile | None
) -> OptimizationStrategy:
    lowest = min(row.level for row in rows)
    whys = list(dict.fromkeys(row.why for row in rows if row.why))
    return OptimizationStrategy(
        name=name,
        description="; ".join([_sentence(rows[0]), *whys]),
        speedup_estimate=_measured(rows[0], profile),
        applicable_levels=tuple(one for one in OptimizationLevel if one.level >= lowest),
    )


def _sentence(row: CapabilityRow) -> str:
    if row.region == GRAPH:
        return f"whole graphs through {row.provider}"
    return f"{row.region.replace('_', ' ')} regions through {row.provider}"


def _measured(row: CapabilityRow, profile: MachineProfile | None) -> float | None:
    """How many times as fast as eager, the mean over what was measured of it on this machine."""
    kind = _MEASURED.get(row.region)
    if profile is None or kind is None:
        return None
    keys = [key for key in profile.rates if (key.kind, key.provider) == (kind, row.provider)]
    return _mean(ratio for key in keys if (ratio := profile.speedup(key)))


def _mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None
