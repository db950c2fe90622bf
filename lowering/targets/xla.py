"""Google TPUs, and what else XLA's runtime computes on.

Two packages lead there, for different torches; users should not have to know. torch_tpu serves
torch 2.11 and later. torch_xla stopped at 2.9 and fits torch of the same minor version only. Both
change torch when they are imported, so the probes here read their metadata; the providers' own
probes start them, once a graph is meant for this target.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import distribution_version, torch_minor

_TPU_NEEDS = (2, 11)
_TPU_FIX = "With torch 2.11 or newer, on a TPU machine: `pip install torch_tpu`"
_XLA_FIX = (
    'In an environment of its own: `pip install "torch==2.9.*" "torch_xla[tpu]==2.9.*"` (without '
    "[tpu] for XLA on the CPU)"
)


def torch_tpu() -> Probe:
    """Is torch_tpu installed, and for this torch? By its metadata."""
    version = distribution_version("torch_tpu")
    if not version:
        return Probe.no("torch_tpu is not installed", _TPU_FIX)
    if torch_minor() < _TPU_NEEDS:
        return Probe.no(
            f"torch_tpu {version} is ignored: it needs torch 2.11 or newer, "
            f"not {torch.__version__}",
            _XLA_FIX,
            installed=version,
        )
    return Probe.yes(version)


def torch_xla() -> Probe:
    """Is torch_xla installed, and of this torch's minor version? By its metadata."""
    version = distribution_version("torch_xla")
    if not version:
        return Probe.no("torch_xla is not installed", _XLA_FIX)
    minor = ".".join(version.split(".")[:2])
    if minor != ".".join(map(str, torch_minor())):
        return Probe.no(
            f"torch_xla {version} is ignored: it needs torch {minor} exactly, "
            f"not {torch.__version__}",
            _TPU_FIX,
            installed=version,
        )
    return Probe.yes(version)


def probe() -> Probe:
    """The package that fits this torch, or why each installed one is ignored. Starts nothing."""
    tpu, xla = torch_tpu(), torch_xla()
    ignored = [found.reason for found in (tpu, xla) if "installed" in found.details]
    if tpu.available:
        if xla.version:
            ignored = [f"torch_xla {xla.version} is ignored: torch_tpu serves this torch"]
        return _found("torch_tpu", "tpu", tpu.version, ignored)
    if xla.available:
        return _found("torch_xla", "xla", xla.version, ignored, *_float64())
    if ignored:
        packages = [found.details.get("installed", "") for found in (tpu, xla)]
        return Probe.no("; ".join(ignored), f"{_TPU_FIX}. {_XLA_FIX}", installed=" ".join(packages))
    return Probe.no("neither torch_tpu nor torch_xla is installed", f"{_TPU_FIX}. {_XLA_FIX}")


def _float64() -> list[str]:
    """TPUs have no unit for it; PJRT's CPU and GPUs do."""
    return ["fp64"] if os.environ.get("PJRT_DEVICE", "").startswith(("CPU", "CUDA")) else []


def _found(provider: str, device: str, version: str, notes: list[str], *features: str) -> Probe:
    """`device`: what torch calls it. Rows ask for the package by its name among the features."""
    told = [f"{provider} is installed and fits; whether a TPU answers was not tried", *notes]
    return Probe.yes(
        f"{provider} {version}",
        provider=provider,
        device=device,
        features=[provider, *features],
        notes=told,
    )


_WIDE = frozenset({"float64", "complex128"})


def _row(
    provider: str, priority: int, *features: str, level: Level = Level.O1, **limits: Any
) -> CapabilityRow:
    needed = frozenset(features)
    return CapabilityRow("xla", provider, GRAPH, level, priority, features=needed, **limits)


def _eager(package: str, *features: str, **limits: Any) -> CapabilityRow:
    why = "op by op, as the package itself runs them"
    needs = frozenset({package})
    return _row("eager", 0, package, *features, level=Level.O0, needs=needs, why=why, **limits)


TARGET = Target(
    name="xla",
    summary="Google TPUs, and what else XLA's runtime computes on",
    device_types=("xla", "tpu"),
    probe=probe,
    aliases=("tpu",),
    priority=50,
    extra="tpu",
    proven_on="torch_xla 2.9 with PJRT's CPU device; never on a TPU",
    on_paper={
        "tpu": {"device": "tpu", "features": ["torch_tpu"]},
        "torch_xla": {"device": "xla", "features": ["torch_xla"]},
        "cpu": {"device": "xla", "features": ["torch_xla", "fp64"]},  # PJRT's
    },
    rows=(
        _row(
            "torch_tpu",
            60,
            "torch_tpu",
            refused_dtypes=_WIDE,
            subclasses=False,
            why="whole graphs go to XLA, which fuses and lays out for the TPU's matrix units",
        ),
        _row(
            "torch_xla",
            50,
            "torch_xla",
            "fp64",
            subclasses=False,
            why="XLA on PJRT's CPU or GPU, in every dtype that torch_xla has",
        ),
        _row(
            "torch_xla",
            49,
            "torch_xla",
            refused_dtypes=_WIDE,
            subclasses=False,
            why="whole graphs go to XLA; TPUs emulate float64, some hundred times slower",
        ),
        # By package, so that a forced device starts it before tensors are moved to it.
        _eager("torch_tpu", refused_dtypes=_WIDE),
        _eager("torch_xla", "fp64"),
        _eager("torch_xla", refused_dtypes=_WIDE),
    ),
)
