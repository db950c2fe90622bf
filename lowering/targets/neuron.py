"""AWS Trainium and Inferentia. Its tensors are torch's "xla" device, which the target `xla` owns;
the name "neuron" stands for the hardware until this project has a lowering for it."""

from __future__ import annotations

import glob
import importlib.util

from lowering.contract import Probe, Target
from lowering.targets.cuda import distribution_version


def probe() -> Probe:
    """torch_neuronx and a Neuron device. Imports nothing: torch_neuronx patches torch_xla."""
    if not _installed():
        return Probe.no(
            "torch_neuronx is not installed",
            "pip install torch-neuronx neuronx-cc --extra-index-url "
            "https://pip.repos.neuron.amazonaws.com",
        )
    version = distribution_version("torch-neuronx")
    devices = _devices()
    if not devices:
        return Probe.no(
            f"torch_neuronx {version} is installed, but no device /dev/neuron* is seen",
            "Install aws-neuronx-dkms on a trn or inf2 instance; in a container, start it with "
            "`--device=/dev/neuron0`",
        )
    return Probe.yes(version, device_count=len(devices), devices=devices)


def _installed() -> bool:
    try:
        return importlib.util.find_spec("torch_neuronx") is not None
    except (ImportError, ValueError):  # ValueError: a half-made module in sys.modules
        return False


def _devices() -> list[str]:
    return sorted(glob.glob("/dev/neuron[0-9]*"))


TARGET = Target(
    name="neuron",
    summary="AWS Trainium and Inferentia: found and reported, not compiled for",
    device_types=("neuron",),
    probe=probe,
    aliases=("nki", "trainium", "inferentia"),
    priority=35,
    proven_on="probe and record only in this version",
    rows=(),
)
