"""The page of promises: what it reads from tests, and that no row is missing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.quick


@pytest.fixture
def feature_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import feature_table

    yield feature_table
    sys.modules.pop("feature_table", None)


def test_every_row_has_a_test_that_says_its_promise(feature_table) -> None:
    assert feature_table.problems(feature_table.rows()) == []


def test_a_row_without_test_promise_or_number_is_named(feature_table) -> None:
    found = {name: feature_table.Row(name, "kept", [], ["t"]) for name in feature_table.expected()}
    del found["S001-03"]
    found["S002-05"].promise = ""
    found["S003-99"] = feature_table.Row("S003-99", "kept", [], ["tests/x.py::test_s003_99_x"])
    assert feature_table.problems(found) == [
        "no test is named by S001-03",
        "no test of S002-05 has a docstring",
        "tests/x.py::test_s003_99_x names S003-99, no such row",
    ]


def test_promise_and_status_come_from_the_test(feature_table, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(
        '@pytest.mark.status("met, not run on hardware")\n'
        "def test_s000_04_s001_12_shaders():\n"
        '    """Said in\n    two lines.\n\n    And more."""\n'
        "class TestMore:\n"
        "    def test_s000_04_again(self): pass\n"
        "def test_other(): pass\n"
    )
    monkeypatch.setattr(feature_table, "TESTS", folder)
    found = feature_table.rows()
    assert set(found) == {"S000-04", "S001-12"}
    assert found["S000-04"].promise == "Said in two lines."
    assert found["S000-04"].status == "met, not run on hardware"
    assert found["S000-04"].tests == [
        "tests/test_one.py::test_s000_04_s001_12_shaders",
        "tests/test_one.py::test_s000_04_again",
    ]


def test_no_test_hides_another_of_its_name(feature_table) -> None:
    """Python keeps the last of two functions of one name: the first would never run."""
    for path in feature_table.TESTS.rglob("test_*.py"):
        names = [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
        assert len(names) == len(set(names)), path
