"""Tests of tests: those that run a suite belong to `make proofs`."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.proof)
