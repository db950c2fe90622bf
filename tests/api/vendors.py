"""Machines with the devices of any vendor, for tests of the API that has one class for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from kernel_dispatch import devices
from lowering.contract import Probe, Target

H100 = {"name": "NVIDIA H100", "arch": "sm90", "memory_bytes": 80 << 30}
A100 = {"name": "NVIDIA A100", "arch": "sm80", "memory_bytes": 40 << 30}
MI300 = {"name": "AMD Instinct MI300X", "arch": "gfx942", "memory_bytes": 192 << 30}
ARC = {"name": "Intel Arc", "memory_bytes": 16 << 30, "fp64": False, "driver": "1.6.3"}
M3 = {"name": "arm64", "memory_bytes": 16 << 30}


def _gpus(*records: Mapping[str, Any]) -> dict[str, Any]:
    return {"device_count": len(records), "devices": list(records), "features": []}


HERE: dict[str, dict[str, Any]] = {
    "nvidia": {"cuda": _gpus(H100, A100)},
    "amd": {"rocm": _gpus(MI300)},
    "tpu": {"xla": {"provider": "torch_xla", "device": "xla", "features": ["torch_xla"]}},
    "intel": {"xpu": _gpus(ARC)},
    "mps": {"mps": _gpus(M3)},
}


def machine_with(monkeypatch: pytest.MonkeyPatch, *vendors: str, pjrt: str = "TPU") -> None:
    """From now on probes say that these vendors' devices and the CPU are here, nothing else."""
    here = {target: told for vendor in vendors for target, told in HERE[vendor].items()}

    def probe(target: Target) -> Probe:
        if target.name == "cpu":
            return target.probe()
        if target.name in here:
            return Probe.yes("1.0", **here[target.name])
        return Probe.no(f"no {target.name} in this test", f"buy a {target.name}")

    def probe_provider(name: str) -> Probe:
        return Probe.yes("2.9", pjrt=pjrt) if name == "torch_xla" else Probe.yes("1.0")

    monkeypatch.setattr(devices, "probe", probe)
    monkeypatch.setattr(devices, "probe_provider", probe_provider)
    monkeypatch.delenv("UNIFIED_DEVICE", raising=False)


class Net(nn.Module):
    """Two layers, large enough that O1 has a library call for them where one is faster."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """A method that calls the model, as generate() does."""
        return 2 * self(x)
