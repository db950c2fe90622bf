"""AMD GPUs, through a ROCm build of torch. torch calls the device "cuda" here too; what tells the
two apart is `torch.version.hip`, never a device's name."""

from __future__ import annotations

from typing import Any

import torch

from lowering.capability import CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import (
    build,
    build_name,
    device_details,
    inductor_config,
    install,
    torch_minor,
    unseen,
)
from lowering.targets.gpu import shared_rows


def probe() -> Probe:
    """A ROCm build of torch that sees a GPU. Never raises."""
    version = build("hip")
    if version is None:
        return Probe.no(f"this torch is {build_name()}, not a ROCm build", install(rocm_index()))
    try:
        if not torch.cuda.is_available():
            return Probe.no(f"this torch is built for ROCm {version}, {unseen()}", _FIX_UNSEEN)
        details = device_details(_gfx)
    except Exception as error:  # noqa: BLE001  (the driver's word becomes the reason)
        return Probe.no(f"ROCm {version} does not start: {type(error).__name__}: {error}")
    return Probe.yes(version, **details)


_FIX_UNSEEN = (
    "Run `rocminfo`: if it fails, install the amdgpu driver and `sudo usermod -aG render,video "
    "$USER`; in a container, start it with `--device=/dev/kfd --device=/dev/dri`"
)


def _gfx(properties: Any) -> str:
    """ "gfx942" out of "gfx942:sramecc+:xnack-": the switches after it select no kernel of ours."""
    return str(properties.gcnArchName).partition(":")[0]


def rocm_index() -> str:
    """The ROCm for which pytorch.org builds this minor version of torch."""
    minor = torch_minor()
    if minor < (2, 10):
        return "rocm6.4"
    return "rocm7.1" if minor < (2, 11) else "rocm7.2"


TARGET = Target(
    name="rocm",
    summary="AMD GPUs, through Inductor's Triton kernels, ours and eager",
    device_types=("cuda",),
    probe=probe,
    aliases=("amd", "hip"),
    priority=60,
    proven_on="not run on hardware by this version",
    inductor_config=inductor_config,
    rows=(
        *shared_rows("rocm", tensor_cores="cdna", decoding=80),
        CapabilityRow(
            "rocm",
            "inductor",
            "convolution",
            Level.O2,
            priority=10,
            early=True,
            why="convolutions are MIOpen's, whoever generates the rest",
        ),
    ),
)
