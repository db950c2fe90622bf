"""Medians, their intervals, and speed-ups from pairs."""

from __future__ import annotations

import random
import statistics

import pytest

from kernel_dispatch.bench import estimates

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (9, 2), (15, 4), (20, 6), (30, 10), (60, 22)])
def test_ranks_are_those_of_the_binomial_table(n: int, rank: int) -> None:
    assert estimates.median_interval(range(1, n + 1)) == (rank, n + 1 - rank)


def test_with_few_values_the_extremes_are_all_there_is() -> None:
    assert estimates.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert estimates.median_interval([2.0]) == (2.0, 2.0)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):  # a skewed distribution, as times have
        low, high = estimates.median_interval([draw.expovariate(1.0) for _ in range(15)])
        hits += low <= 0.6931 <= high
    assert 0.94 < hits / 2000 < 0.99


def test_times() -> None:
    times = estimates.times([5.0, 1.0, 3.0, 2.0, 4.0], calls=7)
    assert (times.median, times.low, times.high, times.calls) == (3.0, 1.0, 5.0, 7)
    assert times.samples == (5.0, 1.0, 3.0, 2.0, 4.0), "in the order of the rounds"
    assert estimates.times([2.0], 1).q1 == 2.0


def test_a_machine_that_slows_down_for_a_while_does_not_change_the_speedup() -> None:
    busy = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 1.0, 1.0]
    found = estimates.speedup([2.0 * one for one in busy], busy)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_speedup_pairs_the_rounds() -> None:
    baseline, candidate = [2.0, 4.0, 6.0], [1.0, 4.0, 2.0]
    assert estimates.speedup(baseline, candidate).value == statistics.median([2.0, 1.0, 3.0])
    with pytest.raises(ValueError, match="zip"):
        estimates.speedup(baseline, candidate[:2])
