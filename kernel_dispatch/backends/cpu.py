"""The CPU: always here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernel_dispatch.backends.device_info import DeviceInfo
from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from lowering import machine
from lowering.contract import Probe


class CPUBackend(TargetBackend):
    BACKEND_NAME = "cpu"
    TARGET = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _named(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        info = super()._get_device_info(device_id)
        facts = machine.cpu()
        info.device_name = facts.model
        info.total_memory_bytes = facts.memory_bytes  # 0 where the system does not tell
        return info

    def _driver_version(self, found: Probe, known: Mapping[str, Any]) -> str | None:
        return None

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        facts = machine.cpu()
        return {
            "vendor": facts.vendor,
            "isa": sorted(facts.isa),
            "effective_cores": facts.effective_cores,
            "logical_cores": facts.logical_cores,
            "memory_limit_bytes": facts.memory_limit_bytes,
            "threads": torch.get_num_threads(),
        }


class CPUOptimizer(TargetOptimizer):
    BACKEND = CPUBackend
