"""What NVIDIA's and AMD's backends tell alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowering.contract import Probe
from lowering.targets.gpu import features_of


def properties(found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
    """By the device's own architecture, as its driver names it."""
    if not found.available:
        return {}
    arch = str(known.get("arch", ""))
    return {
        "architecture": arch,
        "fp8_supported": "fp8" in features_of(arch),
        "features": sorted(features_of(arch)),
        "triton": found.details.get("triton", ""),
    }
