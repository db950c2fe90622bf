"""A lane's own tests are skipped, and say so, where the torch or the library of the lane is not."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

from tests.lanes import LANES, Lane


class Elsewhere(pytest.Module):
    """A test file that is not even imported: what it imports is not here."""

    reason = ""

    def collect(self) -> Iterable[pytest.Item]:
        raise pytest.skip.Exception(self.reason, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    lane = next((lane for lane in LANES if lane.tests in module_path.parents), None)
    if lane is None or _is_here(lane):
        return None
    module: Elsewhere = Elsewhere.from_parent(parent, path=module_path)
    module.reason = f"needs {lane.wants}"
    return module


def _is_here(lane: Lane) -> bool:
    return all(_has(*wanted) for wanted in (("torch", lane.torch), lane.beside) if wanted)


def _has(distribution: str, minor: str) -> bool:
    try:
        return metadata.version(distribution).split(".")[:2] == minor.split(".")
    except metadata.PackageNotFoundError:
        return False
