"""The page of promises: every row of the seed documents, as the tests named by its ID tell it.

A test called `test_s002_26_...` belongs to row S002-26. The first paragraph of its docstring is the
promise; `@pytest.mark.status("...")` says how far it is met, where that is not "met".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
# Group -> what its document describes, and how many rows it has.
GROUPS = {
    "S000": ("Providers: design", 39),
    "S001": ("Providers: usage", 18),
    "S002": ("One interface for every vendor", 44),
    "S003": ("Layer rules", 20),
}
_NAMED = re.compile(r"test((?:_s\d{3}_\d{2})+)_")
_ID = re.compile(r"s(\d{3})_(\d{2})")
_ESCAPED = str.maketrans({"|": "\\|", "\n": " "})

HEAD = """# Promises

Every promise of the documents that this project began with, the test that holds it, and how far
it is met. Generated from the tests by `python docs/generate.py`: a promise is the docstring of the
test that is named by its ID, so a row cannot say more than a test asserts.
"""


@dataclass
class Row:
    """One promise, as its tests tell it."""

    id: str
    promise: str = ""
    statuses: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "; ".join(dict.fromkeys(self.statuses)) or "met"


def rows() -> dict[str, Row]:
    """ID -> row, for all that tests name."""
    found: dict[str, Row] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        constants = _constants(tree)
        for test in _tests(tree):
            for identity in _identities(test.name):
                row = found.setdefault(identity, Row(identity))
                row.tests.append(f"{path.relative_to(TESTS.parent).as_posix()}::{test.name}")
                row.promise = row.promise or _first_paragraph(test)
                row.statuses += _statuses(test, constants)
    return found


def expected() -> list[str]:
    return [f"{group}-{n:02}" for group, (_, count) in GROUPS.items() for n in range(1, count + 1)]


def problems(found: dict[str, Row]) -> list[str]:
    """What keeps the page from being whole, one sentence each."""
    known = expected()
    missing = [f"no test is named by {identity}" for identity in known if identity not in found]
    silent = [f"no test of {row.id} has a docstring" for row in found.values() if not row.promise]
    strange = [f"{row.tests[0]} names {row.id}, no such row" for row in found.values()]
    return (
        missing
        + silent
        + [text for text, name in zip(strange, found, strict=True) if name not in known]
    )


def page() -> str:
    """The page; an incomplete set of tests is an error that lists every gap."""
    found = rows()
    if gaps := problems(found):
        raise SystemExit("docs/features.md cannot be made: " + "; ".join(gaps))
    sections = [_section(group, found) for group in GROUPS]
    return "\n".join([HEAD, _summary(found), *sections])


def _summary(found: dict[str, Row]) -> str:
    met = sum(row.status == "met" for row in found.values())
    partly = sum(row.status.startswith("met,") for row in found.values())
    return (
        f"{len(found)} promises: {met} met, {partly} met as far as it could be shown here, "
        f"{len(found) - met - partly} open, each with the reason.\n"
    )


def _section(group: str, found: dict[str, Row]) -> str:
    title, _ = GROUPS[group]
    lines = [
        f"## {group}: {title}",
        "",
        "| ID | promise | status | tests |",
        "| --- | --- | --- | --- |",
    ]
    for row in (found[identity] for identity in expected() if identity.startswith(group)):
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        cells = (row.id, row.promise.translate(_ESCAPED), row.status.translate(_ESCAPED), tests)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _NAMED.match(node.name)
    )


def _identities(name: str) -> list[str]:
    named = _NAMED.match(name)
    assert named is not None
    return [f"S{group}-{number}" for group, number in _ID.findall(named[1])]


def _first_paragraph(test: ast.FunctionDef) -> str:
    return " ".join((ast.get_docstring(test) or "").partition("\n\n")[0].split())


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """What the module calls by a name of its own: a text, or the whole mark."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _statuses(test: ast.FunctionDef, constants: dict[str, ast.expr]) -> list[str]:
    """The texts of its `pytest.mark.status(...)` decorators."""
    meant = [_resolved(mark, constants) for mark in test.decorator_list]
    marks = [mark for mark in meant if isinstance(mark, ast.Call)]
    named = [mark for mark in marks if ast.unparse(mark.func).endswith("mark.status")]
    return [ast.literal_eval(_resolved(mark.args[0], constants)) for mark in named]


def _resolved(node: ast.expr, constants: dict[str, ast.expr]) -> ast.expr:
    return constants.get(node.id, node) if isinstance(node, ast.Name) else node
