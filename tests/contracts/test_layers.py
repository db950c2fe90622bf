"""kernel_dispatch -> lowering -> triton_kernels, one way only: read off the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
LAYERS = ("kernel_dispatch", "lowering", "triton_kernels")
COMPANIONS = ("tests", "benchmarks", "docs")


def imports(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            and node.args
        ):
            first = node.args[0]
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            if isinstance(parts[0], ast.Constant):
                found.append((node.lineno, str(parts[0].value)))
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    assert sources(layer)
    forbidden = (*LAYERS[: LAYERS.index(layer)], *COMPANIONS)
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sources(layer)
        for line, name in imports(file)
        if name.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_the_scan_sees_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "import a.b\nfrom c import d\nimport importlib\n"
        "def f():\n    from e.g import h\n    importlib.import_module(f'i.{x}')\n"
    )
    names = {name for _, name in imports(file)}
    assert {"a.b", "c", "e.g", "i."} <= names


def test_lowering_reads_no_variable_of_ours() -> None:
    """UNIFIED_* belongs to kernel_dispatch.settings alone."""
    wrong = [
        str(file.relative_to(ROOT))
        for package in LAYERS[1:]
        for file in sources(package)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("UNIFIED_")
        and " " not in node.value
    ]
    assert wrong == []


def test_the_backend_is_registered_once() -> None:
    """A decorator beside the entry point would raise "duplicate name" in torch."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for package in LAYERS
        for file in sources(package)
        for line, text in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"(@|dynamo\b.*)\bregister_backend", text)
    ]
    assert wrong == []
