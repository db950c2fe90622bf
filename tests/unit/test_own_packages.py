"""A user's file by the name of one of our packages is named, before anything else fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_dispatch import own_packages

_ROOT = Path(own_packages.__file__).parents[1]


@pytest.mark.quick
def test_ours_are_found() -> None:
    own_packages.demand()


@pytest.mark.parametrize("name", ["lowering", "triton_kernels"])
@pytest.mark.parametrize("as_package", [False, True])
def test_what_hides_one_is_named(name: str, as_package: bool, tmp_path: Path) -> None:
    hiding = tmp_path / name if as_package else tmp_path / f"{name}.py"
    if as_package:
        hiding.mkdir()
    (hiding / "__init__.py" if as_package else hiding).write_text("x = 1\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert f"needs its own package `{name}`, and Python finds {hiding} first" in done.stderr


def test_a_plain_folder_of_that_name_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "lowering").mkdir()
    assert run(tmp_path).returncode == 0


def test_a_copy_of_ours_that_comes_first_is_ours(tmp_path: Path) -> None:
    """Which is how planted bugs are tested, and how anybody tries a change without installing."""
    shutil.copytree(_ROOT / "triton_kernels", tmp_path / "triton_kernels")
    assert run(tmp_path).returncode == 0


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(_ROOT)])
    return subprocess.run(
        [sys.executable, "-c", "import kernel_dispatch"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
