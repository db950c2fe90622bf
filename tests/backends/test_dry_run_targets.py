"""Plans for the targets that have no list of architectures: what is told, and that nothing of a
vendor's is started for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_dispatch
from kernel_dispatch.cli import main
from kernel_dispatch.imagined_devices import parse_device
from lowering.errors import SettingError
from tests.backends.test_third_party_target import _TOY, install
from tests.conftest import Python
from tests.support.gpu_plans import lowered

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
VENDORS = {"torch_xla", "torch_tpu", "torch_neuronx", "intel_extension_for_pytorch"}

SCRIPT = """
import torch

def step():
    layer = torch.nn.Linear(8, 8).eval().requires_grad_(False)
    return layer, (torch.randn(4, 8),)

def double():
    layer = torch.nn.Linear(8, 8).double().eval().requires_grad_(False)
    return layer, (torch.randn(4, 8).double(),)
"""


def layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(dtype).eval().requires_grad_(False)


# What a user names, what that is taken to be, and who computes an inference graph and a double one.
PLANS = [
    ("mps", "mps:macos15", "mps", "inductor", "eager"),
    ("metal:macos13", "mps:macos13", "mps", "inductor", "eager"),
    ("xpu", "xpu:client", "xpu", "inductor", "eager"),
    ("xpu:max", "xpu:max", "xpu", "inductor", "inductor"),
    ("xla", "xla:tpu", "xla", "torch_tpu", "eager"),
    ("tpu:0", "xla:tpu", "xla", "torch_tpu", "eager"),
    ("XLA:torch_xla", "xla:torch_xla", "xla", "torch_xla", "eager"),
    ("xla:cpu", "xla:cpu", "xla", "torch_xla", "torch_xla"),
    ("neuron", "neuron:trn2", "neuron", "nki", "eager"),
    ("trainium:inf2", "neuron:inf2", "neuron", "nki", "inductor"),
]


@pytest.mark.parametrize(("device", "name", "target", "provider", "double"), PLANS)
def test_plans(device: str, name: str, target: str, provider: str, double: str) -> None:
    x = torch.randn(4, 8)
    told = kernel_dispatch.dry_run(layer(), (x,), device=device)
    if not told.absent:
        pytest.skip(f"{target} is here")
    (graph,) = told.graphs
    assert (told.device, graph.plan.target, graph.plan.provider) == (name, target, provider)
    assert told.complete, str(told)
    assert graph.why
    first = told.text().splitlines()[0]
    assert first.startswith(f"dry run for {name} at O2, which is not here (")
    assert first.endswith("): 1 graph")
    assert graph.least_seconds is None
    assert "at least" not in str(told)
    wide = kernel_dispatch.dry_run(layer(torch.float64), (x.double(),), device=device)
    assert wide.graphs[0].plan.provider == double
    assert ("not take float64" in str(wide)) == (double != provider)
    assert not VENDORS & set(sys.modules)


def test_the_cpu_is_here_and_its_own_features_count() -> None:
    from kernel_dispatch import devices
    from lowering import targets

    told = kernel_dispatch.dry_run(layer(), (torch.randn(4, 8),), device="cpu:0")
    assert (told.device, told.absent) == ("cpu", "")
    assert "and nothing ran there" in str(told)
    cpu = targets.find("cpu")
    assert cpu is not None
    assert list(told.features) == devices.probe(cpu).details["features"]


def test_rejected_rows_levels_and_json() -> None:
    x = torch.randn(4, 8)
    low = kernel_dispatch.dry_run(layer(), (x,), device="xpu:max", options={"level": "O1"})
    assert "not by inductor: inductor may be used from O2 on" in str(low)
    off = kernel_dispatch.dry_run(layer(), (x,), device="xla", options={"disable": "torch_tpu"})
    assert "not by torch_tpu: torch_tpu is disabled by the user" in str(off)
    told = kernel_dispatch.dry_run(layer(), (x,), device="neuron")
    verbose = told.text(verbose=True)
    for name in ("cpu", "cuda", "rocm", "xla", "xpu", "mps"):
        assert f"not {name}/graph: this plan is for neuron:trn2" in verbose
    found = json.loads(told.json())
    assert (found["device"], found["features"]) == ("neuron:trn2", ["native"])
    assert "torch_neuronx is not installed" in found["absent"]
    assert found["graphs"][0]["least_seconds"] is None


@pytest.mark.parametrize("device", ["xpu:arc", "xla:gpu", "neuron:trn9", "mps:macos3", "xpux"])
def test_what_no_dry_run_knows(device: str) -> None:
    with pytest.raises(SettingError, match=r"is none that a dry run knows: one of .*xpu:client"):
        kernel_dispatch.dry_run(layer(), (torch.randn(4, 8),), device=device)


@pytest.mark.parametrize("device", ["xla", "xpu"])
def test_the_planned_graph_still_computes_the_model_and_its_gradients(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, target = torch.randn(6, 8), torch.randint(4, (6,))
    compiled, backend = lowered(model, device)
    loss = functional.cross_entropy(compiled(x), target)
    loss.backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain = functional.cross_entropy(model(x), target)
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])
    assert [graph.plan.target for graph in backend.graphs] == [device]


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "shop.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "shop.py"


@pytest.mark.parametrize("device", ["mps", "xla", "xpu", "tpu", "neuron", "mps:0"])
@pytest.mark.parametrize("command", ["explain", "dry_run"])
def test_a_device_that_is_not_here_is_planned_for(
    shop: str, command: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not parse_device(device).absent:
        pytest.skip(f"{device} is here")
    assert main([command, f"{shop}:step", "--device", device, "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "which is not here (" in lines[0]
    assert any(line.startswith("  not cpu/graph: this plan is for") for line in lines)


def test_a_device_that_is_here_is_explained_for_real(
    shop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{shop}:step", "--device", "cpu", "--level", "O1"]) == 0
    out = capsys.readouterr().out
    assert "ran 1 time" in out
    assert "dry run" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "shop.py", "--device", "mps"], "'mps' was forced (from --device) and is not"),
        (["explain", "shop.py:step", "--device", "mps:2"], "'mps:2' was forced"),
        (["explain", "shop.py:step", "--device", "cuda"], "dry_run --device cuda:sm80"),
        (["dry_run", "shop.py:step", "--device", "cuda"], "one of cuda:sm80"),
        (["dry_run", "shop.py:step", "--device", "mps", "--emit", "x"], "--device cuda:sm90"),
        (["explain", "shop.py:step", "--device", "mps", "--emit", "x"], "--device cuda:sm90"),
        (["dry_run", "shop.py", "--device", "mps"], "a dry run takes a function"),
    ],
)
def test_wrong_usage(
    shop: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


# --- targets of others ----------------------------------------------------------------------------

_FOREIGN = """
import torch, kernel_dispatch
import toy_target as toy
told = kernel_dispatch.dry_run(torch.nn.Linear(4, 4), (torch.randn(2, 4),), device="toy",
                               options={"level": "O1"})
print(told)
print(told.complete, len(toy.compiled))
"""


def test_a_provider_that_cannot_plan_is_not_started(python: Python, tmp_path: Path) -> None:
    source = _TOY.replace('Probe.yes("1.0")', 'Probe.no("no toy in sight")')
    site = install(tmp_path, source=source, devices='("toydevice",)')
    out = python(_FOREIGN, PYTHONPATH=site).stdout.splitlines()
    assert out[0] == "dry run for toy at O1, which is not here (no toy in sight): 1 graph"
    assert "target toy, provider toycc" in out[1]
    assert out[2] == "  how toycc divides the graph is known where it runs, not here"
    assert out[-1] == "True 0"


def test_a_target_without_rows(python: Python, tmp_path: Path) -> None:
    start, end = _TOY.index("    rows=("), _TOY.index("    to_target=")
    source = _TOY[:start] + "    rows=(),\n" + _TOY[end:]
    source = source.replace('Probe.yes("1.0")', 'Probe.no("no toy in sight")')
    site = install(tmp_path, source=source, devices='("toydevice",)')
    out = python(_FOREIGN, PYTHONPATH=site).stdout
    assert "target toydevice, provider eager" in out
    assert "not by toy: toy has no lowering in this version" in out
