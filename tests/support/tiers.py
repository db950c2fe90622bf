"""What `make test` leaves to `make wide`: further cases of what a test shows with some of them.

`@pytest.mark.sampled(4)` keeps one in four of a test's cases, drawn by their names, so that a case
stays where it is when others come or go. A test whose cases were all left away keeps the first.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest


def leave_to_the_wide_tier(items: Sequence[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        kept = [item for item in of_one_test if _is_drawn(item)] or of_one_test[:1]
        for item in of_one_test:
            if item not in kept:
                item.add_marker(pytest.mark.wide)


def _is_drawn(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("sampled")
    assert marker is not None
    (one_in,) = marker.args
    return zlib.crc32(item.name.encode()) % one_in == 0
