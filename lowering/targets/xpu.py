"""Intel GPUs, through an XPU build of torch. (IPEX, for CPUs, is `providers/ipex.py`.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import (
    build,
    build_name,
    install,
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
                # The widths in which work-items run together: Triton takes 16 or 32 of them.
                "sub_group_sizes": list(getattr(one, "sub_group_sizes", None) or ()),
                "driver": str(getattr(one, "driver_version", "")),
            }
            for one, has_fp64 in zip(properties, fp64, strict=True)
        ],
        "features": ["fp64"] if fp64 and all(fp64) else [],
        "triton": triton,
        "notes": notes,
    }


def inductor_config(level: Level) -> Mapping[str, Any]:
    """At O3 Inductor may time its own alternatives; below it, its defaults are kept."""
    return {"max_autotune": True} if level >= Level.O3 else {}


# Emulated nowhere: a kernel with one of these does not even build for such a GPU.
_NEED_FP64 = frozenset({("float64", "fp64"), ("complex128", "fp64")})

TARGET = Target(
    name="xpu",
    summary="Intel GPUs, through Inductor's Triton kernels, oneDNN and eager",
    device_types=("xpu",),
    probe=probe,
    priority=40,
    proven_on="not run on hardware by this version",
    inductor_config=inductor_config,
    on_paper={"client": {"features": []}, "max": {"features": ["fp64"]}},
    rows=(
        CapabilityRow(
            "xpu",
            "inductor",
            GRAPH,
            Level.O2,
            priority=50,
            dtype_features=_NEED_FP64,
            needs=frozenset({"triton"}),
            negated=False,
            why="Inductor fuses into Triton kernels and leaves large products and convolutions to "
            "oneDNN; float64 where the GPU has it: Arc and other client GPUs have not",
        ),
        CapabilityRow(
            "xpu",
            "eager",
            GRAPH,
            Level.O0,
            dtype_features=_NEED_FP64,
            why="takes what torch's XPU kernels take; float64 where the GPU has it",
        ),
    ),
)
