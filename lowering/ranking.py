"""Who is fast at what here: a machine's rates as an order of providers for each kind of region.

Rates decide only where they differ clearly. Providers that are nearly level keep the order of their
capability rows, which knows what a bare rate does not: epilogues that are absorbed, calls saved.
So two runs of the same measurement, or two ranks with like machines, choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lowering.capability import CapabilityRow
from lowering.prior import Prior
from lowering.profile import EAGER, SHAPES, Ranking, RateKey

Orders = Mapping[tuple[str, str, str], tuple[str, ...]]  # (region, dtype, shape class) -> providers

_KINDS = {"linear": "gemm", "convolution": "conv"}
_CLEARLY = 1.1


def orders(rates: Ranking, rows: Iterable[CapabilityRow]) -> Orders:
    """For each region that was measured: providers, best first; those behind eager are slower."""
    found = {}
    listed = sorted((row for row in rows if row.region in _KINDS), key=lambda row: -row.priority)
    for region in dict.fromkeys(row.region for row in listed):
        mine = [row for row in listed if row.region == region]
        for dtype in sorted({dtype for row in mine for dtype in row.dtypes or ()}):
            for shape in SHAPES[_KINDS[region]]:
                fitting = [row for row in mine if _takes(row, dtype, shape)]
                key = RateKey(_KINDS[region], "", dtype, shape)
                order = _order(rates, key, _preferred(rates, fitting))
                if order:
                    found[region, dtype, shape] = order
    return found


def _takes(row: CapabilityRow, dtype: str, shape: str) -> bool:
    """A provider may have another row, with another priority, for other shapes."""
    return (not row.dtypes or dtype in row.dtypes) and (
        row.shape_classes is None or shape in row.shape_classes
    )


def _preferred(rates: Ranking, rows: Iterable[CapabilityRow]) -> Sequence[str]:
    """By priority, then eager, then those who have to show by a measurement that they are faster;
    an expectation shows nothing."""
    rows = list(rows)
    ready = [row.provider for row in rows if not row.only_if_measured]
    others = [] if isinstance(rates, Prior) else [row.provider for row in rows]
    return tuple(dict.fromkeys([*ready, EAGER, *others]))


def _order(rates: Ranking, key: RateKey, preferred: Sequence[str]) -> tuple[str, ...]:
    """`preferred`, but whoever is clearly faster than one before him passes him."""
    order: list[str] = []
    for name in preferred:
        speed = rates.speedup(key._replace(provider=name))
        if speed is None:
            continue
        place = len(order)
        while place and speed > _CLEARLY * (
            rates.speedup(key._replace(provider=order[place - 1])) or 0.0
        ):
            place -= 1
        order.insert(place, name)
    return tuple(order)


def takers(rows: Iterable[CapabilityRow], order: Sequence[str]) -> list[CapabilityRow]:
    """Rows in the order of the measurement; those that were not measured by priority, behind.

    Left out: who was measured to be slower than eager, and who may only be used where measured.
    Rows whose gain is not in the rates, which are of single calls, stay before lower priorities.
    """
    rows = sorted(rows, key=lambda row: -row.priority)
    place = {name: index for index, name in enumerate(order)}
    last = place.get(EAGER, len(order))
    kept = [
        row
        for row in rows
        if not row.before_measured
        and place.get(row.provider, -1) <= last
        and (not row.only_if_measured or order[:1] == (row.provider,))
    ]
    kept.sort(key=lambda row: place.get(row.provider, len(place)))  # stays in order of priority
    for row in rows:
        if row.before_measured:
            kept.insert(_before_lower(row, kept), row)
    return kept


def _before_lower(row: CapabilityRow, kept: Sequence[CapabilityRow]) -> int:
    """But not before one that may be used because it was measured to be the first."""
    lower = (
        index
        for index, other in enumerate(kept)
        if other.priority < row.priority and not other.only_if_measured
    )
    return next(lower, len(kept))
