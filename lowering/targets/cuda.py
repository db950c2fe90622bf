"""NVIDIA GPUs, through a CUDA build of torch. What ROCm shares with it (device records, install
commands, Triton's flavour) is here too, since torch calls both kinds of device "cuda"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

from lowering.capability import CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.gpu import HALF, features_of, shared_rows


def probe() -> Probe:
    """A CUDA build of torch that sees a GPU. Never raises: what a vendor library throws is told."""
    version = build("cuda")
    if build("hip") is not None:
        return Probe.no(f"this torch is a ROCm build ({torch.__version__})", install(cuda_index()))
    if version is None:
        return Probe.no(f"this torch is {build_name()}", install(cuda_index()))
    try:
        if not torch.cuda.is_available():
            return Probe.no(f"this torch is built for CUDA {version}, {unseen()}", _FIX_UNSEEN)
        details = device_details(lambda props: f"sm{props.major}{props.minor}")
    except Exception as error:  # noqa: BLE001  (the driver's word becomes the reason)
        return Probe.no(f"CUDA {version} does not start: {type(error).__name__}: {error}")
    return Probe.yes(version, **details)


_FIX_UNSEEN = (
    "Run `nvidia-smi`: if it fails, install the NVIDIA driver; in a container, start it with "
    "`--gpus all`"
)


def unseen() -> str:
    """ "no driver or GPU", and the variable that hides them where one is set."""
    hidden = [
        f"{name}={os.environ[name]!r}"
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        if name in os.environ
    ]
    return "but no driver or GPU is seen" + (f" ({', '.join(hidden)} is set)" if hidden else "")


def device_details(arch: Callable[[Any], str]) -> dict[str, Any]:
    """The record of every device. `features` holds what *all* of them have: selection does not
    know yet on which one a graph will run."""
    properties: list[Any] = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    archs = [arch(one) for one in properties]
    triton, notes = triton_flavour()
    return {
        "device_count": len(properties),
        "devices": [
            {"name": one.name, "arch": name, "memory_bytes": one.total_memory}
            for one, name in zip(properties, archs, strict=True)
        ],
        "features": sorted(frozenset.intersection(*map(features_of, archs))) if archs else [],
        "triton": triton,
        "notes": notes,
    }


# --- how torch was built --------------------------------------------------------------------------


def build(kind: str) -> str | None:
    """`torch.version.cuda`, `.hip`, `.xpu`: None where this torch was not built for it."""
    return getattr(torch.version, kind, None) or None


def build_name() -> str:
    """What this torch was built for, for sentences of the form "this torch is ..."."""
    names = {"cuda": "a CUDA", "hip": "a ROCm", "xpu": "an XPU"}
    found = next((name for kind, name in names.items() if build(kind)), "a CPU")
    return f"{found} build ({torch.__version__})"


def torch_minor() -> tuple[int, int]:
    """(2, 13) for 2.13.0+cpu and for 2.13.0a0+git1234."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def install(index: str) -> str:
    """The pip command for the same torch from another index. The local version is part of the
    name: pip takes 2.13.0+cpu for 2.13.0 and would change nothing."""
    release = re.fullmatch(r"\d+\.\d+\.\d+", torch.__version__.partition("+")[0])
    wanted = f'"torch=={release[0]}+{index}"' if release else "--force-reinstall torch"
    return f"pip install {wanted} --index-url https://download.pytorch.org/whl/{index}"


def cuda_index() -> str:
    return "cu128" if torch_minor() < (2, 9) else "cu130"


# --- Triton's flavour -----------------------------------------------------------------------------

_TRITONS = (
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-xpu",
    "pytorch-triton-xpu",
    "triton-windows",
)


def triton_flavour() -> tuple[str, list[str]]:
    """What provides `import triton`, and what is wrong with it. Reads metadata, imports nothing.

    The flavours share one import name and overwrite each other. Which one is right is in torch's
    own requirements: wheels of pytorch.org and of AMD name different ones for the same GPUs.
    """
    here = {name: version for name in _TRITONS if (version := distribution_version(name))}
    wanted = _torch_wants()
    notes = []
    if len(here) > 1:
        keep = next(iter(wanted), "the one that torch wants")
        away = " ".join(name for name in here if name not in wanted)
        notes.append(
            f"{' and '.join(sorted(here))} are all installed and overwrite each other's files: "
            f"`pip uninstall -y {away}`, then reinstall {keep}"
        )
    for name, pin in wanted.items():
        if here and name not in here:
            notes.append(
                f"this torch was built with {name}{pin}, and {', '.join(here)} is installed: "
                f"`pip uninstall -y {' '.join(here)}`, then `pip install {name}{pin}`"
            )
        elif name in here and pin.startswith("==") and _public(here[name]) != _public(pin[2:]):
            notes.append(f"this torch was built with {name}{pin}, and {here[name]} is installed")
    right = next((name for name in here if name in wanted), next(iter(here), ""))
    return (f"{right} {here[right]}" if right else ""), notes


def distribution_version(name: str) -> str:
    """The installed version of a distribution, or an empty string. Imports nothing."""
    try:
        return metadata.version(name) or ""
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: a damaged record
        return ""


def _torch_wants() -> Mapping[str, str]:
    """{"triton-rocm": "==3.6.0"}: the Triton in torch's requirements; a CPU wheel names none."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:  # a source tree
        return {}
    wants = {}
    for line in requirements:
        match = re.match(r"([\w.-]+)\s*\(?([^;)\s]*)", line)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        if match and name in _TRITONS and "extra ==" not in line:
            wants[name] = match[2]
    return wants


def _public(version: str) -> str:
    return version.partition("+")[0].strip()


def inductor_config(level: Level) -> Mapping[str, Any]:
    """O3 times its alternatives and replays CUDA graphs; below it, Inductor's defaults.

    A graph whose sizes change is not captured: each size would keep memory of its own for ever.
    """
    if level < Level.O3:
        return {}
    return {
        "max_autotune": True,
        "triton.cudagraphs": True,
        "triton.cudagraph_skip_dynamic_graphs": True,
    }


# Where torch prefers it too; on other architectures it is behind flash attention (published).
_CUDNN_ATTENTION = tuple(
    CapabilityRow(
        "cuda",
        "cudnn",
        "attention",
        Level.O1,
        priority=70,
        dtypes=HALF,
        features=frozenset({architecture}),
        early=True,
        why="on Hopper cuDNN's attention is ahead of flash attention (H100: 5.0 ms against 9.7, "
        "backward 14.8 against 28.7, a step of decoding 363 us against 407)",
    )
    for architecture in ("sm90", "sm100")
)

TARGET = Target(
    name="cuda",
    summary="NVIDIA GPUs, through Inductor's Triton kernels, ours, cuDNN and eager",
    device_types=("cuda",),
    probe=probe,
    aliases=("nvidia",),
    priority=60,
    proven_on="NVIDIA H100 and H200, torch 2.11, Triton 3.6: kernels, models, O3 (docs/gpu.md)",
    inductor_config=inductor_config,
    rows=(
        *shared_rows("cuda", tensor_cores="sm80+", decoding=30),
        *_CUDNN_ATTENTION,
        CapabilityRow(
            "cuda",
            "cudnn",
            "convolution",
            Level.O1,
            priority=60,
            early=True,
            why="convolutions are cuDNN's, whoever generates the rest",
        ),
        CapabilityRow(
            "cuda",
            "cusparselt",
            "linear",
            Level.O2,
            priority=80,
            dtypes=HALF,
            features=frozenset({"sm80+"}),
            training=False,
            early=True,
            min_flops=1 << 28,
            why="weights in which two of every four numbers are zero are multiplied at up to "
            "twice the rate",
        ),
    ),
)
