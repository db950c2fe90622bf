"""The C++ compiler that is here, or is not, and what is said about it."""

from __future__ import annotations

import os
import sys

import pytest

from lowering import toolchain
from lowering.contract import Probe

pytestmark = pytest.mark.quick


def test_a_missing_compiler_is_a_no_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with config.patch({"cpp.cxx": (None, "/nonexistent/c++")}):
        found = toolchain.probe()
        assert not found.available
        assert "/nonexistent/c++" in found.reason
        assert "CXX" in found.fix
        assert toolchain.probe_deep() == found


def test_a_compiler_that_is_no_executable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("CXX", str(tmp_path))
    with config.patch({"cpp.cxx": (None, str(tmp_path))}):  # Inductor lets PermissionError out
        assert not toolchain.probe().available


def test_missing_python_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "for-this-test-only")  # a cache key of its own
    found = toolchain.probe()
    assert not found.available
    assert "Python.h" in found.reason
    assert found.fix


@pytest.mark.parametrize(
    ("system", "word"), [("Darwin", "xcode-select"), ("Windows", "winget"), ("Linux", "install")]
)
def test_the_fix_fits_the_system(system: str, word: str) -> None:
    assert word in toolchain.compiler_fix(None, system)


def test_the_fix_names_the_package_manager_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: "/usr/bin/dnf" if tool == "dnf" else None)
    assert toolchain.compiler_fix(None, "Linux").endswith("dnf install -y gcc-c++")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert toolchain.headers_fix("Linux").endswith(f"dnf install -y python{version}-devel")


def test_deep_check_reports_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, folder: str) -> None:
        raise RuntimeError("tiny.cpp:2: fatal error: vector: No such file")

    ready = Probe.yes("g++ 12", compiler="/usr/bin/g++")
    monkeypatch.setattr(toolchain, "probe", lambda: ready)
    monkeypatch.setattr(toolchain, "_build", fail)
    found = toolchain.probe_deep()
    assert not found.available
    assert "fatal error: vector" in found.reason
    assert found.fix
