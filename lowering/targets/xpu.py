"""Intel GPUs, through an XPU build of torch; and what became of IPEX."""

from __future__ import annotations

from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import (
    build,
    build_name,
    distribution_version,
    install,
    torch_minor,
    triton_flavour,
)


def probe() -> Probe:
    """An XPU build of torch that sees a GPU. Never raises."""
    version = build("xpu")
    if version is None:
        return Probe.no(f"this torch is {build_name()}, not an XPU build", install("xpu"))
    try:
        if not torch.xpu.is_available():
            return Probe.no(
                "this torch is built for XPU, but no driver or GPU is seen",
                "Run `sycl-ls`: if it lists no level_zero GPU, install Intel's compute driver "
                "(https://dgpu-docs.intel.com)",
            )
        details = _details()
    except Exception as error:  # noqa: BLE001  (the driver's word becomes the reason)
        return Probe.no(f"XPU does not start: {type(error).__name__}: {error}")
    return Probe.yes(version, **details)


def _details() -> dict[str, Any]:
    properties: list[Any] = [
        torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())
    ]
    # Client GPUs have no float64: rows that need it ask for the feature.
    fp64 = [bool(getattr(one, "has_fp64", False)) for one in properties]
    triton, notes = triton_flavour()
    return {
        "device_count": len(properties),
        "devices": [
            {
                "name": one.name,
                "memory_bytes": one.total_memory,
                "fp64": has_fp64,
                "driver": str(getattr(one, "driver_version", "")),
            }
            for one, has_fp64 in zip(properties, fp64, strict=True)
        ],
        "features": ["fp64"] if fp64 and all(fp64) else [],
        "triton": triton,
        "notes": notes,
    }


_IPEX = "intel-extension-for-pytorch"
_ARCHIVED = (
    "IPEX is archived: its last release is 2.8, which needs torch 2.8 exactly, and stock torch "
    "(oneDNN and Inductor on CPU, torch.xpu on GPU) replaces it"
)


def ipex_status() -> Probe:
    """IPEX by its metadata only: importing it changes torch. Available only if versions match."""
    version = distribution_version(_IPEX)
    if not version:
        return Probe.no(f"IPEX is not installed, and nothing is missing: {_ARCHIVED}")
    minor = ".".join(map(str, torch_minor()))
    if version.split(".")[:2] == minor.split("."):
        return Probe(True, f"IPEX {version} matches torch {minor}; {_ARCHIVED}", version)
    return Probe.no(
        f"IPEX {version} is ignored under torch {minor}: their minor versions differ; {_ARCHIVED}",
        f"pip uninstall -y {_IPEX}",
        version=version,
    )


TARGET = Target(
    name="xpu",
    summary="Intel GPUs, by torch itself",
    device_types=("xpu",),
    probe=probe,
    priority=40,
    proven_on="probe and record only in this version",
    rows=(CapabilityRow("xpu", "eager", GRAPH, Level.O0, why="takes everything that torch takes"),),
)
