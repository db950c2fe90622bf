"""Intel GPUs, through an XPU build of torch. Intel's CPUs are the backend "cpu"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from lowering.contract import Probe


class IntelBackend(TargetBackend):
    BACKEND_NAME = "intel"
    TARGET = "xpu"

    def _probe(self) -> Probe:
        found = super()._probe()
        if found.available:
            return found
        return replace(found, reason=f"{found.reason} (Intel CPUs are the backend 'cpu')")

    def _driver_version(self, found: Probe, known: Mapping[str, Any]) -> str | None:
        return str(known.get("driver", "")) or found.version or None

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        if not found.available:
            return {}
        return {
            "fp64_supported": bool(known.get("fp64", False)),
            "sub_group_sizes": list(known.get("sub_group_sizes", ())),
            "triton": found.details.get("triton", ""),
        }


class IntelOptimizer(TargetOptimizer):
    BACKEND = IntelBackend
