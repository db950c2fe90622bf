"""From samples to a median with its confidence interval, and from pairs of samples to a speed-up.

Order statistics only: times on a shared machine are skewed, and no distribution is assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kernel_dispatch.bench.results import Speedup, Times

CONFIDENCE = 0.95


def times(samples: Sequence[float], calls: int) -> Times:
    """`samples` are seconds per call, one per round; at least one is needed."""
    low, high = median_interval(samples)
    q1, _, q3 = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Times(tuple(samples), calls, statistics.median(samples), low, high, q1, q3)


def speedup(baseline: Sequence[float], candidate: Sequence[float]) -> Speedup:
    """The median over the rounds of baseline / candidate.

    Both ran in the same round, so what slowed the machine down for seconds slowed both.
    """
    ratios = [one / other for one, other in zip(baseline, candidate, strict=True)]
    return Speedup(statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median: the k-th smallest and largest value, k from the binomial distribution.

    With fewer than six values no pair of them reaches 95%; the extremes are what can be said.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 0.0
    while rank < n // 2:
        outside += math.comb(n, rank) / 2.0**n
        if 2 * outside > 1 - CONFIDENCE:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)
