"""Rows that need a measurement, and providers with several rows, in the order of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lowering.capability import CapabilityRow
from lowering.levels import Level
from lowering.prior import Expectation, Prior
from lowering.profile import EAGER, RateKey
from lowering.ranking import orders, takers
from lowering.targets import cpu

pytestmark = pytest.mark.quick

KEY = ("convolution", "float32", "spatial")


class Rates:
    """Multiples of eager's rate, for spatial convolutions in float32."""

    def __init__(self, **multiples: float) -> None:
        self._multiples: Mapping[str, float] = {**multiples, EAGER: 1.0}

    def faster(self, kind: str, dtype: str, shape: str) -> list[str]:
        return sorted(self._multiples, key=lambda name: -self._multiples[name])

    def speedup(self, key: RateKey, over: str = EAGER) -> float | None:
        if (key.kind, key.dtype, key.shape) != ("conv", "float32", "spatial"):
            return None
        rate = self._multiples.get(key.provider)
        return None if rate is None else rate / self._multiples[over]


def row(provider: str, priority: int, **limits: object) -> CapabilityRow:
    made = CapabilityRow("cpu", provider, "convolution", Level.O1, priority=priority)
    return replace(made, dtypes=frozenset({"float32"}), **limits)


PLAIN = row("plain", 60)
SHY = row("shy", 20, only_if_measured=True, shape_classes=frozenset({"spatial"}))
WIDE = row("shy", 80, shape_classes=frozenset({"wide"}))
ROWS = (WIDE, PLAIN, SHY)


def taken(*order: str) -> list[CapabilityRow]:
    return takers(ROWS, order)


def test_only_where_it_was_measured_and_came_first() -> None:
    assert SHY in taken("shy", "plain", EAGER)
    assert taken("shy", "plain", EAGER)[0].provider == "shy"
    for order in ((), ("plain", "shy", EAGER), ("plain", EAGER), (EAGER, "shy")):
        assert SHY not in taken(*order), order


def test_without_a_measurement_priorities_decide() -> None:
    assert taken() == [WIDE, PLAIN]


def test_a_row_may_come_before_what_was_measured() -> None:
    """Rates are of single calls: also where the same provider was slower than eager there."""
    first, rows = row("joining", 70, before_measured=True), (PLAIN, row("joining", 40))
    assert takers((*rows, first), ("plain", EAGER, "joining")) == [first, PLAIN]
    assert takers((*rows, first), ())[0] == first


def test_it_stays_behind_rows_of_higher_priority_and_those_that_were_measured_to_be_first() -> None:
    joining, higher = row("joining", 70, before_measured=True), row("higher", 80)
    shown = row("shown", 20, only_if_measured=True)
    assert takers((PLAIN, joining, higher), ("plain", "higher", EAGER))[0] == joining
    assert takers((PLAIN, joining, higher), ("higher", "plain", EAGER))[:2] == [higher, joining]
    assert takers((joining, PLAIN, shown), ("shown", "plain", EAGER))[:2] == [shown, joining]


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_rates_of_single_convolutions_do_not_part_what_is_one_call(vendor: str) -> None:
    """A Zen 3 has oneDNN's 1x1 clearly ahead, as a core of a Xeon has, and networks with them take
    up to twice as long."""
    rows = [
        row
        for row in cpu.TARGET.rows
        if (row.region, row.level) in {("convolution", Level.O1), ("convolution", Level.O2)}
        and "float32" in row.dtypes
        and row.features <= {vendor, "avx2"}
        and row.shape_classes is None
    ]
    for order in (("mkldnn", EAGER, "openmp"), ("openmp", EAGER, "mkldnn")):
        assert takers(rows, order)[0].provider == "openmp"


def test_a_row_for_other_shapes_lends_no_priority() -> None:
    """Nearly level: the order of the rows that are for this shape stays."""
    assert orders(Rates(plain=1.5, shy=1.55), ROWS)[KEY] == ("plain", "shy", EAGER)
    assert orders(Rates(plain=1.5, shy=1.8), ROWS)[KEY] == ("shy", "plain", EAGER)


def test_who_needs_a_measurement_has_to_be_clearly_faster_than_eager() -> None:
    alone = (SHY,)
    assert orders(Rates(shy=1.05), alone)[KEY] == (EAGER, "shy")
    assert orders(Rates(shy=1.2), alone)[KEY] == ("shy", EAGER)


def test_an_expectation_is_no_measurement() -> None:
    high = Expectation("conv", "float32", {"plain": 1.5, "shy": 9.0}, "hearsay")
    assert orders(Prior((high,)), ROWS)[KEY] == ("plain", EAGER)


def test_several_rows_of_a_provider_count_once() -> None:
    twice = (*ROWS, row("plain", 50))
    assert orders(Rates(plain=2.0, shy=0.5), twice)[KEY] == ("plain", EAGER, "shy")
