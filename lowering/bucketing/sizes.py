"""Which size stands for a true one: the next bucket."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def next_size(true: int, sizes: Sequence[int] | None = None) -> int:
    """The smallest bucket that holds `true`. Without sizes: powers of two and their 1.5-fold, which
    wastes a third at most. Above the largest of the given sizes: the true size itself."""
    if sizes is not None:
        ordered = sorted(sizes)
        place = bisect.bisect_left(ordered, true)
        return ordered[place] if place < len(ordered) else true
    power = 1 << max(true - 1, 0).bit_length()
    smaller = power * 3 // 4
    return smaller if power >= 4 and true <= smaller else power
