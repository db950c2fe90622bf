"""Devices as values, the layers, and what a plain installation is."""

from __future__ import annotations

import ast
import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from kernel_dispatch import BackendNotAvailableError, Device, DeviceType, SettingError, dry_run
from tests.contracts.test_layers import imports

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
OURS = ("kernel_dispatch", "lowering", "triton_kernels")
VENDORS = ("triton", "torch_xla", "torch_tpu", "torch_neuronx", "intel_extension_for_pytorch")


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x @ w, (8,)).softmax(-1)


@pytest.mark.parametrize("device", ["cuda:sm90", "rocm:gfx942", "mps", "xpu"])
def test_s003_01_one_model_for_every_target(device: str) -> None:
    """Model code names no backend: the same function is planned for every target as it stands."""
    with torch.no_grad():
        inputs = (torch.randn(8, 8), torch.randn(8, 8))
        told = dry_run(model, inputs, {}, device=device, options={"level": "O1"})
    assert told.complete
    assert f"target {device.split(':')[0]}" in told.text()


def test_s003_01_models_import_no_backend() -> None:
    files = [ROOT / "tests/models/zoo.py", *(ROOT / "benchmarks/workloads").rglob("*.py")]
    assert len(files) > 3
    for file in files:
        names = {name.split(".")[0] for _, name in imports(file)}
        # What workloads import of ours is how a workload is described, which computes nothing.
        used = {name for _, name in imports(file) if name.split(".")[0] in OURS}
        assert used <= {"kernel_dispatch.bench", "kernel_dispatch.bench.workload"}, (file, used)
        assert not names & set(VENDORS), file


@pytest.mark.parametrize(
    ("device", "torchs"),
    [
        (Device(DeviceType.Cpu), torch.device("cpu")),
        (Device(DeviceType.Cuda), torch.device("cuda:0")),
        (Device(DeviceType.Cuda, 3), torch.device("cuda:3")),
    ],
)
def test_s003_02_there_and_back(
    device: Device, torchs: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Device` is a type (`Cpu`, `Cuda`, `Hip`) and a number, and becomes a torch.device and back;
    `Hip` needs a torch that was built for ROCm."""
    monkeypatch.setattr(torch.version, "hip", None)
    assert device.torch == torchs
    assert Device.of(torchs) == device
    assert Device.of(str(device)) == device
    assert hash(Device.of(device)) == hash(device)


def test_s003_02_hip_is_what_cuda_means_under_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    hip = Device(DeviceType.Hip, 1)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(BackendNotAvailableError, match="'hip:1' does not exist in torch"):
        _ = hip.torch
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert hip.torch == torch.device("cuda:1")
    assert Device.of(torch.device("cuda:1")) == hip
    with pytest.raises(BackendNotAvailableError, match=r"which was built for ROCm 6\.4"):
        _ = Device(DeviceType.Cuda).torch


def test_s003_02_names_and_mistakes() -> None:
    assert [kind.value for kind in DeviceType] == ["cpu", "cuda", "hip"]
    assert Device.of("rocm:2") == Device(DeviceType.Hip, 2)
    assert Device.of("NVIDIA") == Device(DeviceType.Cuda)
    assert Device.of(torch.device("cpu")) == Device.of("host") == Device(DeviceType.Cpu)
    for given, text in {
        "cudda": "Did you mean 'cuda'",
        "mps": "unknown device type 'mps'",
        "cuda:x": "the number after the colon",
        "cuda:": "the number after the colon",
        "cpu:1": "one CPU device",
        3: "of type int",
    }.items():
        with pytest.raises(SettingError, match=text):
            Device.of(given)
    with pytest.raises(SettingError, match="device_id=-1"):
        Device(DeviceType.Cuda, -1)
    with pytest.raises(SettingError, match="unknown device type 'xpu'"):
        Device.of(torch.device("xpu"))


def test_s003_03_three_layers() -> None:
    """Models call operations, operations say what is meant, providers know how: imports point one
    way."""
    meaning = {name for _, name in imports(ROOT / "lowering/ops.py") if name.startswith("lowering")}
    assert meaning == {"lowering.errors", "lowering.layouts"}
    oracle = {name.split(".")[0] for _, name in imports(ROOT / "lowering/reference.py")}
    assert oracle <= {"__future__", "math", "collections", "torch"}
    for file in (ROOT / "triton_kernels").rglob("*.py"):
        used = {name.split(".")[0] for _, name in imports(file)}
        assert not used & {"kernel_dispatch", "lowering"}, file
    for file in (ROOT / "lowering").rglob("*.py"):
        assert "kernel_dispatch" not in {name.split(".")[0] for _, name in imports(file)}, file


def test_s003_17_gpus_are_extras() -> None:
    """A plain installation needs torch alone; what GPUs and other targets need are extras."""
    needed = requires("kernel-dispatch") or []
    plain = [one for one in needed if "extra ==" not in one]
    assert [re.split(r"[<>=!~ ;]", one)[0] for one in plain] == ["torch"]
    assert any(one.startswith("triton") and "extra ==" in one for one in needed)


def test_s003_18_the_layers_have_their_files() -> None:
    """Operations, their meaning per target and the page on the layers are where the design has
    them."""
    files = (
        "lowering/ops.py",
        "lowering/reference.py",
        "lowering/targets/cpu.py",
        "lowering/targets/cuda.py",
        "lowering/targets/rocm.py",
        "kernel_dispatch/backends/__init__.py",
        "docs/backend_design_cpu_cuda_hip.md",
    )
    for name in files:
        assert (ROOT / name).is_file(), name
    page = (ROOT / "docs/backend_design_cpu_cuda_hip.md").read_text()
    for word in ("matmul2d", "softmax_lastdim", "layernorm", "self_attention", "row-major", "Hip"):
        assert word in page, word
    assert ast.parse((ROOT / "lowering/ops.py").read_text())
