"""IPEX absent, matching and mismatching: the probe, what doctor says, and a plan that ignores it.

What it computes is tested where it is installed: tests/lanes/ipex.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernel_dispatch.diagnosis import diagnose
from lowering import machine
from lowering.providers import ipex
from tests.conftest import Python
from tests.unit.toy_facts import replaced

DISTRIBUTION = "intel-extension-for-pytorch"
Install = Callable[..., Path]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """A distribution by its metadata; its package must not be imported."""

    def add(version: str, library: bool = True) -> Path:
        site = tmp_path / "site"
        info = site / f"intel_extension_for_pytorch-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        package = site / "intel_extension_for_pytorch"
        (package / "lib").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('IPEX was imported')\n")
        if library:
            (package / "lib/libintel-ext-pt-cpu.so").write_text("not a library\n")
        monkeypatch.syspath_prepend(site)
        return site

    return add


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


@pytest.fixture(autouse=True)
def a_cpu_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(machine.cpu(), isa=frozenset({"avx2", "avx512f"}))
    monkeypatch.setattr(machine, "cpu", lambda: facts)


@pytest.mark.quick
@pytest.mark.parametrize("torch_version", ["2.8.0+cpu", "2.8.0+cu128", "2.8.1"])
def test_the_matching_version_is_here(
    install: Install, torch_is: Callable[[str], None], torch_version: str
) -> None:
    install("2.8.0")
    torch_is(torch_version)
    found = ipex.probe()
    assert (found.available, found.version) == (True, "2.8.0")
    (row,) = _rows(found)
    assert row.status == "ok"
    assert "matches torch 2.8; IPEX is archived" in row.text
    assert "replaces it" in row.text


@pytest.mark.quick
@pytest.mark.parametrize("torch_version", ["2.13.0+cpu", "2.9.0", "2.80.0", "2.7.1"])
def test_another_minor_version_is_ignored(
    install: Install, torch_is: Callable[[str], None], torch_version: str
) -> None:
    install("2.8.0")
    torch_is(torch_version)
    found = ipex.probe()
    assert not found.available
    assert found.fix == f"pip uninstall -y {DISTRIBUTION}"
    (row,) = _rows(found)
    assert row.status == "warn"
    minor = ".".join(torch_version.split(".")[:2])
    assert f"IPEX 2.8.0 is ignored under torch {minor}: their minor versions differ" in row.text
    assert "archived" in row.text


@pytest.mark.quick
def test_not_installed_is_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipex, "distribution_version", lambda name: "")
    (row,) = _rows(ipex.probe())
    assert (row.status, row.fix) == ("info", "")
    assert "not installed, and nothing is missing: IPEX is archived" in row.text


@pytest.mark.quick
def test_an_old_cpu_and_a_damaged_install_are_reasons(
    install: Install, torch_is: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("2.8.0", library=False)
    torch_is("2.8.0+cpu")
    found = ipex.probe()
    assert "libintel-ext-pt-cpu.so is missing" in found.reason
    assert f"{DISTRIBUTION}==2.8.0" in found.fix
    old = replace(machine.cpu(), isa=frozenset({"avx"}))
    monkeypatch.setattr(machine, "cpu", lambda: old)
    assert ipex.probe().reason == "IPEX 2.8.0 needs a CPU with AVX2"


@pytest.mark.quick
def test_a_library_that_does_not_load_is_a_reason_too(
    install: Install, torch_is: Callable[[str], None]
) -> None:
    install("2.8.0")
    torch_is("2.8.0+cpu")
    ipex.cannot_load.cache_clear()
    try:
        assert ipex.cannot_load().startswith("IPEX does not load: OSError")
        with pytest.raises(RuntimeError, match="IPEX does not load"):
            ipex.operators()
    finally:
        ipex.cannot_load.cache_clear()


IGNORED = """
import json, sys, torch
import kernel_dispatch
from kernel_dispatch import diagnosis, doctor

layer = torch.nn.Linear(1024, 1024).eval().bfloat16()
compiled = torch.compile(layer, backend="unified", options={"level": "O1"})
with torch.no_grad():
    out = compiled(torch.ones(64, 1024, dtype=torch.bfloat16))
(graph,) = kernel_dispatch.report(compiled)
rows = diagnosis.diagnose(doctor.collect({}))
(row,) = [row for row in rows if row.name == "ipex"]
print(json.dumps({
    "imported": "intel_extension_for_pytorch" in sys.modules,
    "regions": [region.provider for region in graph.regions],
    "rejected": [
        reason.text for no in graph.plan.rejected if no.provider == "ipex" for reason in no.reasons
    ],
    "row": row.as_dict(),
}))
"""


@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="there IPEX 2.8 is not ignored")
def test_the_plan_ignores_it_and_doctor_says_why(install: Install, python: Python) -> None:
    """In a process of its own, with the distribution on its path as a user would have it."""
    site = install("2.8.0")
    told = json.loads(python(IGNORED, PYTHONPATH=str(site)).stdout.splitlines()[-1])
    assert not told["imported"]
    assert "ipex" not in told["regions"]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"IPEX 2.8.0 is ignored under torch {minor}" in " ".join(told["rejected"])
    assert told["row"]["status"] == "warn"
    assert told["row"]["fix"] == f"pip uninstall -y {DISTRIBUTION}"
    assert "archived" in told["row"]["text"]


def _rows(found: object) -> list:
    rows = diagnose(replaced(providers=((ipex.PROVIDER, found),)))
    return [row for row in rows if row.name == "ipex"]
