"""Apple GPUs, through torch's Metal backend."""

from __future__ import annotations

import platform
from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level


def probe() -> Probe:
    """A torch with Metal on a macOS that can use it. Never raises."""
    macos = platform.mac_ver()[0]
    if not macos:
        return Probe.no(f"MPS needs macOS, and this is {platform.system() or 'another system'}")
    try:
        if not torch.backends.mps.is_built():
            return Probe.no(
                f"this torch ({torch.__version__}) is built without MPS",
                "pip install --force-reinstall torch, with an arm64 Python",
            )
        if not torch.backends.mps.is_available():
            return Probe.no(
                f"macOS {macos} shows torch no Metal device",
                "Use macOS 14 or newer on Apple silicon; virtual machines may hide the GPU",
            )
        details = _details()
    except Exception as error:  # noqa: BLE001  (the driver's word becomes the reason)
        return Probe.no(f"MPS does not start: {type(error).__name__}: {error}")
    return Probe.yes(f"macOS {macos}", macos=macos, **details)


def _details() -> dict[str, Any]:
    # Memory is shared with the CPU; Metal recommends how much of it a process should use.
    memory = getattr(torch.mps, "recommended_max_memory", None)
    return {
        "device_count": 1,
        "devices": [
            {
                "name": platform.processor() or platform.machine(),
                "memory_bytes": int(memory()) if memory is not None else 0,
            }
        ],
    }


TARGET = Target(
    name="mps",
    summary="Apple GPUs, by torch itself",
    device_types=("mps",),
    probe=probe,
    aliases=("metal", "apple"),
    priority=30,
    proven_on="probe and record only in this version",
    rows=(
        CapabilityRow(
            "mps",
            "eager",
            GRAPH,
            Level.O0,
            refused_dtypes=frozenset({"float64", "complex64", "complex128"}),
            why="Metal has no float64, and torch's MPS kernels for complex numbers are partial",
        ),
    ),
)
