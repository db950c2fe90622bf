"""Kernels that are built before the suite are those that its workers look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.built_kernels import STORE


def test_they_lie_where_every_worker_looks(
    kernels_of_earlier_runs: Path, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getini("cache_dir") != ".pytest_cache":
        pytest.skip("this run keeps its cache elsewhere")
    assert kernels_of_earlier_runs == STORE
