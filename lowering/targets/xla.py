"""Google TPUs. Two packages compute for them, for different torches; users should not have to know.

torch_tpu serves torch 2.11 and later. torch_xla stopped at 2.9 and fits torch of the same minor
version only. Both patch torch when imported, so the probe reads their metadata.
"""

from __future__ import annotations

import torch

from lowering.contract import Probe, Target
from lowering.targets.cuda import distribution_version, torch_minor

_TPU_NEEDS = (2, 11)
_LANES = (
    "With torch 2.11 or newer: `pip install torch_tpu`. Or the older lane, in an environment of "
    'its own: `pip install "torch==2.9.*" "torch_xla[tpu]==2.9.*"`'
)


def probe() -> Probe:
    """The package that fits this torch, or why each installed one is ignored. Starts nothing."""
    tpu, xla = distribution_version("torch_tpu"), distribution_version("torch_xla")
    ignored = [text for text in (_refuses_tpu(tpu), _refuses_xla(xla)) if text]
    if tpu and not _refuses_tpu(tpu):
        if xla:
            ignored = [f"torch_xla {xla} is ignored: torch_tpu serves this torch"]
        return _found("torch_tpu", tpu, ignored)
    if xla and not _refuses_xla(xla):
        return _found("torch_xla", xla, ignored)
    if ignored:
        return Probe.no("; ".join(ignored), _LANES, torch_tpu=tpu, torch_xla=xla)
    return Probe.no("neither torch_tpu nor torch_xla is installed", _LANES)


def _found(provider: str, version: str, notes: list[str]) -> Probe:
    told = [f"{provider} is installed and fits; whether a TPU answers was not tried", *notes]
    return Probe.yes(f"{provider} {version}", provider=provider, notes=told)


def _refuses_tpu(version: str) -> str:
    if not version or torch_minor() >= _TPU_NEEDS:
        return ""
    return f"torch_tpu {version} is ignored: it needs torch 2.11 or newer, not {torch.__version__}"


def _refuses_xla(version: str) -> str:
    if not version or version.split(".")[:2] == [str(part) for part in torch_minor()]:
        return ""
    minor = ".".join(version.split(".")[:2])
    return (
        f"torch_xla {version} is ignored: it needs torch {minor} exactly, not {torch.__version__}"
    )


TARGET = Target(
    name="xla",
    summary="Google TPUs: found and reported, not compiled for",
    device_types=("xla", "tpu"),
    probe=probe,
    aliases=("tpu",),
    priority=50,
    extra="tpu",
    proven_on="probe and record only in this version",
    rows=(),
)
