"""Triton as it may be found: absent, broken, of another flavour, without a driver, interpreted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from triton_kernels import availability

pytestmark = pytest.mark.quick

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a fake triton into sys.modules; `None` there makes an import fail."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(availability, "packages_distributions", dict)

    def put(*, driver: object = None, key_in: str | None = "triton.runtime.cache") -> None:
        names = ["triton", "triton.runtime", "triton.runtime.cache"]
        names += ["triton.compiler", "triton.compiler.compiler", "triton.backends"]
        for name in names:
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["triton"].__version__ = "3.6.0"  # type: ignore[attr-defined]
        if key_in:
            sys.modules[key_in].triton_key = lambda: "key"  # type: ignore[attr-defined]
        if driver is not None:
            backend = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=driver))
            sys.modules["triton.backends"].backends = {"any": backend}  # type: ignore[attr-defined]

    return put


def test_absent(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found = availability.status()
    assert (found.importable, found.version, found.usable) == (False, "", False)
    assert "triton does not import" in found.reason


def test_a_driver_makes_it_usable(install: Install) -> None:
    install(driver=lambda: True)
    found = availability.status()
    assert (found.importable, found.has_driver, found.usable) == (True, True, True)
    assert found.version == "3.6.0"


def test_older_triton_keeps_its_key_elsewhere(install: Install) -> None:
    install(driver=lambda: True, key_in="triton.compiler.compiler")
    assert availability.status().usable


def test_no_driver_says_what_else_would_do(install: Install) -> None:
    install(driver=lambda: False)
    found = availability.status()
    assert (found.importable, found.has_driver, found.usable) == (True, False, False)
    assert "TRITON_INTERPRET" in found.reason


def test_the_interpreter_needs_no_driver(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(driver=lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert availability.status().interpreter
    assert availability.status().usable
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not availability.status().interpreter


def test_a_triton_without_triton_key_is_refused(install: Install) -> None:
    install(driver=lambda: True, key_in=None)
    found = availability.status()
    assert found.importable
    assert not found.usable
    assert "triton_key" in found.reason


def test_a_missing_triton_key_outranks_a_missing_driver(install: Install) -> None:
    install(driver=lambda: False, key_in=None)
    assert "triton_key" in availability.status().reason


def test_a_driver_that_raises_is_a_reason(install: Install) -> None:
    def broken() -> bool:
        raise OSError("libcuda.so.1: cannot open")

    install(driver=broken)
    found = availability.status()
    assert not found.has_driver
    assert "libcuda.so.1" in found.reason


def test_a_triton_without_backends_is_a_reason(install: Install) -> None:
    install()
    assert "cannot be asked" in availability.status().reason


@pytest.mark.parametrize("ours", ["kernel-dispatch", "kernel_dispatch", "Kernel.Dispatch"])
def test_our_own_distribution_is_not_foreign(monkeypatch: pytest.MonkeyPatch, ours: str) -> None:
    owners = {"triton_kernels": [ours]}
    monkeypatch.setattr(availability, "packages_distributions", lambda: owners)
    assert availability.foreign_distribution() == ""


def test_another_owner_of_our_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"triton_kernels": ["kernel-dispatch", "triton-kernels", "triton-kernels"]}
    monkeypatch.setattr(availability, "packages_distributions", lambda: owners)
    assert availability.foreign_distribution() == "triton-kernels"
