"""A suite that stays green over a bug is no proof: every bug planted here has to turn it red."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from pathlib import Path

import pytest

import triton_kernels
from tests.planted_bugs import bugs, suite
from tests.planted_bugs.bugs import Bug

_FAMILIES = [module.name for module in pkgutil.iter_modules(bugs.__path__)]
_PLANTED = [
    pytest.param(family, bug, id=f"{family}: {bug.what}")
    for family in _FAMILIES
    for bug in importlib.import_module(f"{bugs.__name__}.{family}").BUGS
]


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
    status, said = suite.run(tmp_path, family)
    # By its number alone, a process that died before the suite would look like one that is red.
    assert status == pytest.ExitCode.TESTS_FAILED and " failed" in said, said[-3000:]


@pytest.mark.slow
def test_the_suite_is_green_without_a_bug(tmp_path: Path) -> None:
    """Or everything would be red for a reason of its own."""
    shutil.copytree(Path(triton_kernels.__file__).parent, tmp_path / "triton_kernels")
    status, said = suite.run(tmp_path, "rms_norm")
    assert status == pytest.ExitCode.OK, said[-3000:]


def _source(package: Path, family: str) -> Path:
    return package / "families" / f"{family}.py"
