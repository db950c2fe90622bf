"""What the design asks of the project around the providers: imports, tests, documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_dispatch
from kernel_dispatch.registry import table
from tests.conftest import Python

ROOT = Path(__file__).parents[2]
PERSISTENT_KERNEL = "next: comes with PersistentKernel"


@pytest.mark.quick
@pytest.mark.status(PERSISTENT_KERNEL)
def test_s000_27_persistent_kernel() -> None:
    """PersistentKernel takes a mode, a backend and its fallbacks; there is no name of it before it
    works, and the selection that it will use is there."""
    assert not hasattr(kernel_dispatch, "PersistentKernel")
    from kernel_dispatch.registry import select_backend

    assert select_backend("cuda", ["mps", "cpu"]) in ("cuda", "mps", "cpu")


@pytest.mark.quick
@pytest.mark.status(PERSISTENT_KERNEL)
def test_s000_29_its_list_of_backends() -> None:
    """PersistentKernel lists the same backends as the module function."""
    assert "cpu" in kernel_dispatch.get_available_backends()


_BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"{{name}} is not here")

sys.meta_path.insert(0, Blocked())
import torch
import kernel_dispatch
from kernel_dispatch.registry import BackendRegistry, CompileContext
print([n for n in ("cpu", "opt_einsum") if kernel_dispatch.is_backend_available(n)])
ctx = CompileContext(lambda x: x + 1, (torch.ones(2),), level="O1")
assert BackendRegistry.instance().get_backend("cpu").compile(ctx), ctx.error
for name in ("triton", "nki", "opt_einsum"):
    assert kernel_dispatch.get_backend_info(name)["reason"], name
print(kernel_dispatch.get_backend_info("opt_einsum")["reason"])
"""


def test_s000_34_missing_libraries(python: Python) -> None:
    """Without its optional libraries the package imports and works, and each provider that lacks
    one says so."""
    names = ("triton", "torch_xla", "torch_neuronx", "intel_extension_for_pytorch", "opt_einsum")
    lines = python(_BLOCKED.format(names=names)).stdout.splitlines()
    assert lines[0] == "['cpu']"
    assert lines[-1] == "the package opt_einsum is not installed"


@pytest.mark.quick
@pytest.mark.parametrize("info", table.TABLE, ids=[info.name for info in table.TABLE])
def test_s000_35_a_test_for_each(info: table.BackendInfo) -> None:
    """Every provider has a test of its own, and the tests of registry and configuration take all
    fourteen."""
    row = {
        "cuda": 2,
        "cpu": 3,
        "mps": 4,
        "cudnn": 5,
        "mkl": 6,
        "mkldnn": 7,
        "openmp": 8,
        "nki": 9,
        "triton": 10,
        "cusparselt": 11,
        "mha": 12,
        "nnpack": 13,
        "opt_einsum": 14,
        "xeon": 15,
    }[info.name]
    text = (ROOT / "tests" / "api" / "test_s000_providers.py").read_text()
    named = [n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    assert f"test_s000_{row:02}_{info.name}" in named


@pytest.mark.slow
def test_s000_37_benchmarks() -> None:
    """The time of each provider, and what a switch between backends costs, are measured by
    `pytest benchmarks -k "provider or switch"`."""
    command = [sys.executable, "-m", "pytest", "benchmarks", "-k", "provider or switch"]
    done = subprocess.run(
        [*command, "--collect-only", "-q"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("test_providers[", "test_backend_switch[", "test_provider_switch["):
        assert wanted in done.stdout


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.quick
@pytest.mark.parametrize("info", table.TABLE, ids=[info.name for info in table.TABLE])
def test_s000_38_libraries_are_documented(info: table.BackendInfo) -> None:
    """The libraries that a provider needs and may use stand in the table of the documentation as
    they do in the code."""
    (row,) = re.findall(rf"^\| `{info.name}` \|.*$", page("providers.md"), re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == str(int(info.type))
    assert cells[3] == (", ".join(info.required_libs) or "-")
    assert cells[4] == (", ".join(info.optional_libs) or "-")


@pytest.mark.quick
def test_s000_39_documents() -> None:
    """How to install, the multi-backend feature in the README, the API and a tutorial are
    documented; their Python blocks are run by tests/contracts/test_docs_run.py."""
    for name in ("install.md", "quickstart.md", "providers.md", "backends.md"):
        assert page(name).startswith("# "), name
    readme = (ROOT / "README.md").read_text()
    assert 'backend="unified"' in readme
    assert "pip install" in page("install.md")
    assert "```python" in page("providers.md")
    assert "UNIFIED_CONFIG" in page("providers.md")
