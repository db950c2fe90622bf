"""Machines that users have, as what their probes would say; and graphs as what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernel_dispatch.facts import GraphFacts, nothing_known
from kernel_dispatch.selection import Machine
from lowering import targets
from lowering.contract import Probe, Target
from lowering.targets.gpu import features_of


@dataclass(frozen=True)
class Kind:
    """One kind of machine: what is here, what its probes tell, what works there not."""

    here: Mapping[str, Mapping[str, Any]]
    absent: Mapping[str, str] = field(default_factory=dict)  # provider -> why

    def machine(self) -> Machine:
        def probe(target: Target) -> Probe:
            if target.name in self.here:
                return Probe.yes("1", **self.here[target.name])
            return Probe.no(f"no {target.name} here", f"buy a {target.name}")

        return Machine(targets.ours(), probe, lambda provider: self.absent.get(provider, ""))


def _gpu(architecture: str, cards: int = 1) -> dict[str, Any]:
    return {"device_count": cards, "features": sorted(features_of(architecture))}


EPYC = {"features": ["amd", "avx2", "avx512f"]}
XEON = {"features": ["intel", "avx2", "avx512f", "avx512_bf16"]}
M3 = {"features": ["arm", "neon"]}
_NO_COMPILER = "no working C++ compiler"
_NO_IPEX = {"ipex": "IPEX is not installed"}
_NO_XLA = {"torch_xla": "torch_xla is not installed"}
_NO_TPU = {"torch_tpu": "torch_tpu is not installed"}

MACHINES: dict[str, Kind] = {
    "CPU only": Kind({"cpu": EPYC}),
    "no compiler": Kind({"cpu": EPYC}, dict.fromkeys(("inductor", "openmp", "mha"), _NO_COMPILER)),
    "H100": Kind({"cuda": _gpu("sm90"), "cpu": XEON}),
    "two A100": Kind({"cuda": _gpu("sm80", 2), "cpu": EPYC}),
    "no Triton": Kind({"cuda": _gpu("sm90"), "cpu": XEON}, {"triton": "Triton is gone"}),
    "MI300X": Kind({"rocm": _gpu("gfx942"), "cpu": EPYC}),
    "XPU laptop": Kind({"xpu": {"features": []}, "cpu": {"features": ["intel", "avx2"]}}),
    "XPU server": Kind({"xpu": {"features": ["fp64"]}, "cpu": XEON}),
    "Mac": Kind({"mps": dict(targets.find("mps").on_paper.get("macos15", {})), "cpu": M3}),  # type: ignore[union-attr]
    "TPU, torch_tpu": Kind(
        {"xla": {"device": "tpu", "features": ["torch_tpu"]}, "cpu": EPYC}, _NO_XLA
    ),
    "TPU, torch_xla": Kind(
        {"xla": {"device": "xla", "features": ["torch_xla"]}, "cpu": EPYC}, _NO_TPU
    ),
    "PJRT on a CPU": Kind(
        {"xla": {"device": "xla", "features": ["torch_xla", "fp64"]}, "cpu": EPYC}, _NO_TPU
    ),
    "inf2, traced": Kind({"neuron": {"device": "neuron", "features": ["traced"]}, "cpu": EPYC}),
    "trn2, native": Kind({"neuron": {"device": "neuron", "features": ["native"]}, "cpu": EPYC}),
}

GRAPHS: dict[str, dict[str, Any]] = {
    "inference": {},
    "training": {"training": True},
    "dynamic": {"dynamic": True, "dynamic_dims": ("x[0]",)},
    "writing": {"written_inputs": (0,)},
    "small": {"op_count": 1, "bytes_moved": 64},
    "float64": {"dtypes": ("float64",)},
    "complex64": {"dtypes": ("complex64",)},
    "int64": {"dtypes": ("int64",)},
}


def graph(kind: str, devices: Sequence[str]) -> GraphFacts:
    """Ten operators on a few MB, and what its kind says."""
    usual = {"op_count": 10, "dtypes": ("float32",), "ops": (("add", 10),), "bytes_moved": 1 << 22}
    facts = {**usual, **GRAPHS[kind]}
    return replace(nothing_known("model.py:1"), devices=tuple(devices), **facts)
