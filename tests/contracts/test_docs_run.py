"""Every Python block of README and docs runs as it stands, each file's blocks in one namespace."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from tests.support.pages import PAGES, name, python_blocks

WITH_CODE = [page for page in PAGES if python_blocks(page)]


def test_there_are_blocks_to_run() -> None:
    pages = {"README.md", "docs/quickstart.md", "docs/add_a_target.md", "docs/targets/neuron.md"}
    assert pages <= {name(page) for page in WITH_CODE}


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("block")
    monkeypatch.setitem(sys.modules, "block", module)  # dataclasses look their module up
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), module.__dict__)
