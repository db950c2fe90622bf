"""Every Python block of README and docs runs as it stands, each file's blocks in one namespace."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "targets").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_are_blocks_to_run() -> None:
    assert {"README.md", "docs/add_a_target.md", "docs/targets/neuron.md"} <= set(
        map(name, WITH_CODE)
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("block")
    monkeypatch.setitem(sys.modules, "block", module)  # dataclasses look their module up
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"
