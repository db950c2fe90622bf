"""NVIDIA GPUs, through a CUDA build of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_dispatch.backends import gpu
from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from lowering.contract import Probe


class NVIDIABackend(TargetBackend):
    BACKEND_NAME = "nvidia"
    TARGET = "cuda"

    def _compute_capability(self, known: Mapping[str, Any]) -> str | None:
        """ "9.0" for sm90, "10.0" for sm100."""
        digits = str(known.get("arch", "")).removeprefix("sm")
        return f"{digits[:-1]}.{digits[-1]}" if len(digits) > 1 else None

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        return gpu.properties(found, known)


class NVIDIAOptimizer(TargetOptimizer):
    BACKEND = NVIDIABackend
