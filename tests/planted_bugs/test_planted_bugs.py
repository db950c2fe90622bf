"""A suite that stays green over a bug is no proof: every bug planted here has to turn it red."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import triton_kernels
from tests.planted_bugs import bugs
from tests.planted_bugs.bugs import Bug

_ROOT = Path(__file__).parents[2]
_FAMILIES = [module.name for module in pkgutil.iter_modules(bugs.__path__)]
_PLANTED = [
    pytest.param(family, bug, id=f"{family}: {bug.what}")
    for family in _FAMILIES
    for bug in importlib.import_module(f"{bugs.__name__}.{family}").BUGS
]
# The copy is imported first, so that it is the one that the tests find.
_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import triton_kernels, pytest
assert triton_kernels.__file__.startswith(sys.argv[1])
cache = f"cache_dir={sys.argv[1]}/cache"  # the fixtures of all tests need one
sys.exit(pytest.main(["-x", "-q", "-o", cache, "--no-header", sys.argv[2]]))
"""


@pytest.mark.quick
@pytest.mark.parametrize(("family", "bug"), _PLANTED)
def test_a_planted_bug_has_its_place(family: str, bug: Bug) -> None:
    """So that a kernel written anew says so at once, not after minutes of the slow tier."""
    text = _source(Path(triton_kernels.__file__).parent, family).read_text()
    assert text.count(bug.right) == 1, f"{text.count(bug.right)} places read: {bug.right}"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bug"), _PLANTED)
def test_a_planted_bug_turns_the_suite_red(family: str, bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / "triton_kernels"
    shutil.copytree(Path(triton_kernels.__file__).parent, copy)
    source = _source(copy, family)
    source.write_text(source.read_text().replace(bug.right, bug.wrong))
    done = _run(tmp_path, family)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:] + done.stderr


@pytest.mark.slow
def test_the_suite_is_green_without_a_bug(tmp_path: Path) -> None:
    """Or everything would be red for a reason of its own."""
    shutil.copytree(Path(triton_kernels.__file__).parent, tmp_path / "triton_kernels")
    done = _run(tmp_path, "rms_norm")
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:] + done.stderr


def _source(package: Path, family: str) -> Path:
    return package / "families" / f"{family}.py"


def _run(folder: Path, family: str) -> subprocess.CompletedProcess[str]:
    tests = f"tests/kernels/triton/test_{family}.py"
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(folder), tests],
        cwd=_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
