"""What the wheel promises: names, entry points, version windows, types."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest

import kernel_dispatch

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brought it")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.quick


def test_the_backend_is_registered_once_and_only_by_entry_point() -> None:
    found = [
        entry
        for entry in metadata.entry_points(group="torch_dynamo_backends")
        if entry.name == "unified"
    ]
    assert [entry.value for entry in found] == ["kernel_dispatch.backend:unified"]
    sources = "".join(path.read_text() for path in (ROOT / "kernel_dispatch").rglob("*.py"))
    for torchs in ("import register_backend", "dynamo.register_backend"):  # not the registry's own
        assert torchs not in sources


def test_torch_is_the_only_dependency_and_the_version_has_one_place() -> None:
    assert PROJECT["dependencies"] == ["torch>=2.8,<2.16"]
    assert "version" in PROJECT["dynamic"]
    assert kernel_dispatch.__version__ == metadata.version("kernel-dispatch")


def test_extras_pair_each_library_with_the_torch_that_it_exists_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"triton", "ipex", "xla", "tpu", "bench", "dev"} <= set(extras)
    assert any(dep.startswith("torch>=2.8,<2.9") for dep in extras["ipex"])
    assert any(dep.startswith("torch>=2.9,<2.10") for dep in extras["xla"])
    assert any(dep.startswith("torch>=2.11") for dep in extras["tpu"])


@pytest.mark.parametrize("package", ["kernel_dispatch", "lowering", "triton_kernels"])
def test_packages_are_typed_and_public_names_exist(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_the_sources_of_the_kernels_are_in_the_wheel() -> None:
    """They are built on the user's machine."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["lowering.native"]
    sources = [file for file in (ROOT / "lowering" / "native").iterdir() if file.is_file()]
    for file in sources:
        assert file.suffix == ".py" or any(fnmatch(file.name, one) for one in patterns), file


def test_every_public_name_loads() -> None:
    assert set(kernel_dispatch.__all__) == {*kernel_dispatch._PUBLIC, "__version__"}
    for name in kernel_dispatch.__all__:
        assert getattr(kernel_dispatch, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        kernel_dispatch.no_such_name  # noqa: B018
