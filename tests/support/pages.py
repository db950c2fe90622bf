"""README and documentation as tests read them: pages, code, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without its fenced code."""
    return _FENCED.sub("", page.read_text())


def python_blocks(page: Path) -> list[str]:
    return _PYTHON.findall(page.read_text())


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> list[str]:
    """As GitHub makes them of headings, and as mkdocs.yml tells the site to."""
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in _headings(page))
    return [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]


def _headings(page: Path) -> list[str]:
    return _HEADING.findall(prose(page))


def quoted(page: Path) -> Iterator[str]:
    """What stands in backticks in a line, and every line of an indented block."""
    text = prose(page)
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from (line.strip() for line in text.splitlines() if line.startswith("    "))
