"""Numbers as a reader wants them: three significant digits and a unit of a handy size."""

from __future__ import annotations

import math

NONE = "\u2013"  # en dash
_TO = f" {NONE} "
_TIMES_SIGN = "\u00d7"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def seconds(value: float | None) -> str:
    return NONE if value is None else _with_unit(value, _TIMES)


def seconds_range(low: float, high: float) -> str:
    """Both ends in the unit of the upper one: `12.1 to 12.6 ms`, with a dash."""
    scale, unit = _unit(high, _TIMES)
    return f"{digits(low / scale)}{_TO}{digits(high / scale)} {unit}"


def bytes_(value: float | None) -> str:
    return NONE if value is None else f"{_with_unit(value, _THOUSANDS)}B"


def flops_rate(value: float) -> str:
    return f"{_with_unit(value, _THOUSANDS)}FLOP/s"


def bytes_rate(value: float) -> str:
    return f"{_with_unit(value, _THOUSANDS)}B/s"


def short(value: float) -> str:
    """For the ticks of an axis: `100 G`."""
    scale, unit = _unit(value, _THOUSANDS)
    return f"{value / scale:g} {unit}".strip()


def ratio(value: float) -> str:
    """Two decimals, as speed-ups are read, and more only where nothing would be left."""
    shown = f"{value:.2f}" if 0.1 <= abs(value) < 10 else digits(value)
    return shown + _TIMES_SIGN


def ratio_tick(value: float) -> str:
    return f"{value:g}{_TIMES_SIGN}"


def ratio_range(low: float, high: float) -> str:
    return f"{ratio(low)[:-1]}{_TO}{ratio(high)[:-1]}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{digits(100 * value)}%"


def error(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def digits(value: float) -> str:
    """Three significant digits, no exponent where a reader would rather have zeros."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    places = 2 - math.floor(math.log10(abs(rounded)))
    return f"{value:.1e}" if places > 6 else f"{rounded:.{max(places, 0)}f}"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = _unit(value, units)
    return f"{digits(value / scale)} {unit}"


def _unit(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    size = float(f"{abs(value):.3g}") if math.isfinite(value) else 1.0
    # A hair below the unit: 1000 ns rounds to less than 1e-6 in binary.
    return next((each for each in units if size >= each[0] * (1 - 1e-9)), units[-1])
