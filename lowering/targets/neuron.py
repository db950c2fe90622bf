"""AWS Trainium and Inferentia, through either of two packages that share the name torch-neuronx.

Up to 2.9 it sits on torch_xla: graphs are traced into compiled artifacts that take and give CPU
tensors. From 2.13 on it is a device of torch's own, "neuron", with a compiler registered for
torch.compile. Each fits torch of its own minor version only. The probe tells them apart by their
metadata: the older one changes torch when it is imported.
"""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import distribution_version, torch_minor

DEVICE = "neuron"  # what the native package calls it
TRACED, NATIVE = "traced", "native"  # the features that rows ask for
_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
_BACKEND = ("torch_dynamo_backends", "neuron")  # the entry point of the native package


def probe() -> Probe:
    """torch_neuronx, of this torch's minor version, and a Neuron device. Imports nothing."""
    if not _installed():
        return Probe.no("torch_neuronx is not installed", _install())
    version = distribution_version("torch-neuronx")
    devices = _devices()
    reasons = [*_refuses(version), *([] if devices else [f"torch_neuronx {version}: {_NO_DEVICE}"])]
    if reasons:
        fix = _install() if _refuses(version) else _DRIVER
        return Probe.no("; ".join(reasons), fix, installed=version)
    way = NATIVE if compiler() is not None else TRACED
    found = {"device_count": len(devices), "devices": devices, **_DETAILS[way]}
    return Probe.yes(version, device=DEVICE, **found)


# The older package leaves tensors on the CPU, where its artifacts fetch them.
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    NATIVE: {"features": [NATIVE]},
    TRACED: {"features": [TRACED], "tensors": "cpu"},
}


_NO_DEVICE = "no device /dev/neuron* is seen"
_DRIVER = (
    "Install aws-neuronx-dkms on a trn or inf2 instance; in a container, start it with "
    "`--device=/dev/neuron0`"
)


def _install() -> str:
    if (2, 10) <= torch_minor() < (2, 13):
        return "AWS has a torch-neuronx for torch up to 2.9 and from 2.13 on; install one of these"
    minor = ".".join(map(str, torch_minor()))
    return f'pip install "torch-neuronx=={minor}.*" neuronx-cc {_INDEX}'


def _installed() -> bool:
    try:
        return importlib.util.find_spec("torch_neuronx") is not None
    except (ImportError, ValueError):  # ValueError: a half-made module in sys.modules
        return False


def _refuses(version: str) -> list[str]:
    minor = ".".join(version.split(".")[:2])
    if minor == ".".join(map(str, torch_minor())):
        return []
    needs = f"it needs torch {minor} exactly, not {torch.__version__}"
    return [f"torch_neuronx {version} is ignored: {needs}"]


def _devices() -> list[str]:
    return sorted(glob.glob("/dev/neuron[0-9]*"))


def compiler() -> metadata.EntryPoint | None:
    """What the native package registers for torch.compile; the older one registers nothing."""
    try:
        registered = metadata.distribution("torch-neuronx").entry_points
    except metadata.PackageNotFoundError:
        return None
    return next((one for one in registered if (one.group, one.name) == _BACKEND), None)


_NO_NUMBERS = frozenset({"float64", "complex64", "complex128"})


TARGET = Target(
    name="neuron",
    summary="AWS Trainium and Inferentia: inference, through torch_neuronx",
    device_types=("neuron",),
    probe=probe,
    aliases=("nki", "trainium", "inferentia"),
    priority=35,
    proven_on="a fake torch_neuronx only; never on a Neuron device",
    on_paper={"trn2": _DETAILS[NATIVE], "inf2": _DETAILS[TRACED]},
    rows=(
        CapabilityRow(
            "neuron",
            "nki",
            GRAPH,
            Level.O1,
            50,
            refused_dtypes=_NO_NUMBERS,
            training=False,
            no_training="AWS dropped training through PyTorch/XLA with Neuron 2.30, and the native "
            "package's was not tried by this project",
            dynamic=False,
            subclasses=False,
            why="torch_neuronx's own compiler takes whole graphs of fixed sizes; the device has no "
            "float64 and no complex numbers",
        ),
        CapabilityRow(
            "neuron",
            "eager",
            GRAPH,
            Level.O0,
            refused_dtypes=_NO_NUMBERS,
            features=frozenset({NATIVE}),
            why="the native package brings kernels for torch's operators, one by one",
        ),
    ),
)
