"""A sample of the cases is for every run, and none of the others is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiers import leave_to_the_wide_tier

pytestmark = pytest.mark.quick


class Case:
    """As much of a `pytest.Item` as is asked for."""

    def __init__(self, name: str, one_in: int | None) -> None:
        self.name, self.nodeid, self.added = name, f"test_file.py::{name}", list[str]()
        self._sampled = pytest.mark.sampled(one_in).mark if one_in else None

    def get_closest_marker(self, name: str) -> Any:
        return self._sampled if name == "sampled" else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.added.append(marker.name)


def kept(cases: list[Any]) -> set[str]:
    leave_to_the_wide_tier(cases)
    assert all(case.added in ([], ["wide"]) for case in cases)
    return {case.name for case in cases if not case.added}


def cases(count: int, one_in: int | None) -> list[Any]:
    return [Case(f"test_it[{i}]", one_in) for i in range(count)]


def test_about_one_in_so_many_is_kept() -> None:
    assert 150 < len(kept(cases(1000, 5))) < 250


def test_a_case_stays_where_it_is_when_others_come() -> None:
    assert kept(cases(100, 3)) == kept(cases(200, 3)) & {case.name for case in cases(100, 3)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_test_is_left_away_as_a_whole(count: int) -> None:
    assert kept(cases(count, 1_000_003))


def test_others_are_all_kept() -> None:
    assert len(kept(cases(50, None))) == 50
