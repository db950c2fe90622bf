"""A logarithmic axis: where a value lies, and which values get a tick."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kernel_dispatch.bench.views import svg


@dataclass(frozen=True)
class Axis:
    """Maps `low`..`high` (both above zero) to pixels `start`..`end`; what lies beyond is cut."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        span = self.high / self.low
        if span < 4:
            return self._even()
        steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if span < 20 else (1.0, 2.0, 5.0)
        return self._decades(steps if span < 1e3 else (1.0,))

    def _decades(self, steps: tuple[float, ...]) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        return self._inside(
            10.0**power * step for power in range(first, last + 1) for step in steps
        )

    def _even(self) -> list[float]:
        rough = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        return self._inside(
            step * count
            for count in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)
        )

    def _inside(self, values: Iterable[float]) -> list[float]:
        # Multiples of a decimal step carry binary dust: 0.1 * 3.
        return [v for v in (float(f"{each:.9g}") for each in values) if self.low <= v <= self.high]


def around(values: Iterable[float], room: float = 1.06) -> tuple[float, float]:
    """Bounds of an axis that shows all `values` with some room; (0.5, 2) without any."""
    usable = [value for value in values if math.isfinite(value) and value > 0]
    if not usable:
        return 0.5, 2.0
    return min(usable) / room, max(usable) * room


def labelled_ticks(
    axis: Axis, label: Callable[[float], str], keep: float | None = None
) -> list[tuple[float, str]]:
    """Ticks with labels; "" where one would run into its neighbour. `keep` always has its own."""
    taken: list[tuple[float, float]] = []
    labels: dict[float, str] = {}
    for value in sorted(axis.ticks(), key=lambda each: (each != keep, each)):
        half = svg.text_width(label(value), 11) / 2 + 3
        x = axis.at(value)
        free = all(x + half < low or x - half > high for low, high in taken)
        labels[value] = label(value) if free else ""
        if free:
            taken.append((x - half, x + half))
    return sorted(labels.items())
