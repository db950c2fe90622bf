"""Libraries beside a torch that they were not made for: the plan ignores them, `doctor` says why,
and what to do. End to end: distributions as pip leaves them on disk, in a second process.

Where the wanted torch is not the one that runs here, its version is pretended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lowering.targets.cuda import torch_minor
from tests.conftest import Python

pytestmark = pytest.mark.slow

IPEX, XLA, TPU, NEURON = "intel-extension-for-pytorch", "torch_xla", "torch_tpu", "torch-neuronx"
_MODULES = {IPEX: "intel_extension_for_pytorch", NEURON: "torch_neuronx"}


def install(site: Path, name: str, version: str) -> Path:
    """The distribution as pip would leave it; the file that exists once somebody imported it."""
    module = _MODULES.get(name, name)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n")
    package, mark = site / module, site / f"{module}.imported"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nraise ImportError('{name} finds no device')\n"
    )
    return mark


_SCRIPT = """
import contextlib, io, json, os, runpy, sys
import torch
pretended, device, marks = {arguments!r}
if pretended:
    torch.__version__ = pretended
import kernel_dispatch
from lowering.contract import Probe
from lowering.native import library

if pretended:  # under another torch's name our kernels would be built once more
    library.probe = Probe.yes

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
x = torch.randn(16, 64)
compiled = torch.compile(model, backend="unified", options={{"level": "O1"}})
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
(graph,) = kernel_dispatch.report(compiled)
imported = [mark for mark in marks if os.path.exists(mark)]
refused = ""
if device:
    try:
        torch.compile(model, backend="unified", options={{"device": device}})(x)
    except Exception as error:
        refused = f"{{type(error).__name__}}: {{error}}"
sys.argv = ["kernel_dispatch", "doctor", "--json"]
with contextlib.redirect_stdout(io.StringIO()) as doctor:
    try:
        runpy.run_module("kernel_dispatch", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
print(json.dumps({{
    "targets": kernel_dispatch.available_targets(),
    "target": graph.target,
    "providers": [graph.provider, *graph.plan.providers, *(r.provider for r in graph.regions)],
    "fallbacks": [str(fallback) for fallback in graph.fallbacks],
    "why": {{
        no.target: [reason.text for reason in no.reasons]
        for no in graph.plan.rejected if not no.provider
    }},
    "imported": imported,
    "refused": refused,
    "rows": json.loads(doctor.getvalue())["rows"],
    "code": code,
}}))
"""


@dataclass(frozen=True)
class Case:
    torch: str
    installed: dict[str, str]
    row: str  # of doctor
    said: tuple[str, ...]
    fix: tuple[str, ...]
    device: str = "xla"  # the name by which a user would force it


IGNORED = {
    "IPEX 2.8 under 2.13": Case(
        "2.13.0",
        {IPEX: "2.8.0"},
        "ipex",
        ("IPEX 2.8.0 is ignored under torch 2.13", "archived"),
        (f"pip uninstall -y {IPEX}",),
        "xpu",
    ),
    "torch_xla 2.9 under 2.13": Case(
        "2.13.0",
        {XLA: "2.9.0"},
        "xla",
        ("torch_xla 2.9.0 is ignored: it needs torch 2.9 exactly, not 2.13.0",),
        ("pip install torch_tpu", '"torch==2.9.*"'),
    ),
    "torch_xla 2.8 under 2.13": Case(
        "2.13.0",
        {XLA: "2.8.0"},
        "xla",
        ("torch_xla 2.8.0 is ignored: it needs torch 2.8 exactly, not 2.13.0",),
        ("pip install torch_tpu", '"torch==2.9.*"'),
    ),
    "torch_xla 2.8 under 2.9": Case(
        "2.9.1",
        {XLA: "2.8.0"},
        "xla",
        ("torch_xla 2.8.0 is ignored: it needs torch 2.8 exactly, not 2.9.1",),
        ('"torch==2.9.*"',),
    ),
    "torch_tpu under 2.9": Case(
        "2.9.1",
        {TPU: "0.2.0"},
        "xla",
        ("torch_tpu 0.2.0 is ignored: it needs torch 2.11 or newer, not 2.9.1",),
        ('"torch==2.9.*" "torch_xla[tpu]==2.9.*"',),
    ),
    "both under 2.10": Case(
        "2.10.0",
        {TPU: "0.2.0", XLA: "2.9.0"},
        "xla",
        (
            "torch_tpu 0.2.0 is ignored: it needs torch 2.11 or newer, not 2.10.0",
            "torch_xla 2.9.0 is ignored: it needs torch 2.9 exactly, not 2.10.0",
        ),
        ("pip install torch_tpu", '"torch==2.9.*"'),
    ),
    "torch-neuronx without a device": Case(
        "2.9.1",
        {NEURON: "2.9.0"},
        "neuron",
        ("torch_neuronx 2.9.0: no device /dev/neuron* is seen",),
        ("aws-neuronx-dkms",),
        "neuron",
    ),
    "torch-neuronx 2.9 under 2.13": Case(
        "2.13.0",
        {NEURON: "2.9.0"},
        "neuron",
        ("torch_neuronx 2.9.0 is ignored: it needs torch 2.9 exactly, not 2.13.0",),
        ('"torch-neuronx==2.13.*"',),
        "neuron",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", IGNORED.values(), ids=IGNORED.keys())
def test_what_does_not_fit_is_ignored_with_a_reason(
    python: Python, tmp_path: Path, case: Case
) -> None:
    marks = [install(tmp_path / "site", *one) for one in case.installed.items()]
    told = _told(python, tmp_path, case, case.device, marks)
    assert told["target"] == "cpu"
    nobody = {case.row, case.device, *(_PROVIDERS.get(name, name) for name in case.installed)}
    assert not nobody & {*told["targets"], *told["providers"]}
    assert told["fallbacks"] == []
    assert "is not here" in told["refused"]
    if case.row == case.device:  # the library is all that the target waits for
        for words in case.said:
            assert words in told["refused"]
            assert words in " ".join(told["why"][case.device])
    row = _row(told, case)
    for words in case.said:
        assert words in row["text"]
    for words in case.fix:
        assert words in row["fix"]
    assert row["status"] == "warn", "something was installed to no effect: worth more than absent"
    assert told["code"] == 0, "nothing that the user asked for is missing"
    assert not any(mark.exists() for mark in marks), "importing it changes torch, or crashes"


FITS = {
    "torch_tpu under 2.13": Case("2.13.0", {TPU: "0.2.0"}, "xla", ("here: torch_tpu 0.2.0",), ()),
    "torch_tpu and torch_xla under 2.13": Case(
        "2.13.0",
        {TPU: "0.2.0", XLA: "2.9.0"},
        "xla",
        ("here: torch_tpu 0.2.0", "torch_xla 2.9.0 is ignored: it needs torch 2.9 exactly"),
        (),
    ),
    "torch_tpu and torch_xla under 2.9": Case(
        "2.9.1",
        {TPU: "0.2.0", XLA: "2.9.0"},
        "xla",
        (
            "here: torch_xla 2.9.0",
            "torch_tpu 0.2.0 is ignored: it needs torch 2.11 or newer, not 2.9.1",
        ),
        (),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FITS.values(), ids=FITS.keys())
def test_what_fits_is_found_and_leaves_cpu_tensors_where_they_are(
    python: Python, tmp_path: Path, case: Case
) -> None:
    marks = [install(tmp_path / "site", *one) for one in case.installed.items()]
    told = _told(python, tmp_path, case, "", marks)
    assert told["imported"] == [], "a plan for the CPU has no use for it"
    assert "xla" in told["targets"]
    assert told["target"] == "cpu"
    assert told["fallbacks"] == []
    assert "the tensors are on cpu" in " ".join(told["why"]["xla"])
    row = _row(told, case)
    for words in case.said:
        assert words in row["text"]
    assert (row["status"], told["code"]) == ("ok", 0)


_PROVIDERS = {IPEX: "ipex", NEURON: "nki"}


def _told(
    python: Python, folder: Path, case: Case, device: str, marks: list[Path]
) -> dict[str, Any]:
    arguments = (_pretended(case.torch), device, [str(mark) for mark in marks])
    script = _SCRIPT.format(arguments=arguments)
    out = python(script, timeout=600, PYTHONPATH=str(folder / "site")).stdout
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def _row(told: dict[str, Any], case: Case) -> dict[str, Any]:
    (row,) = (row for row in told["rows"] if row["name"] == case.row)
    return dict(row)


def _pretended(version: str) -> str:
    """Empty where the torch that runs here is of that minor version."""
    minor = "{}.{}".format(*torch_minor())
    return "" if version.startswith(f"{minor}.") else version
