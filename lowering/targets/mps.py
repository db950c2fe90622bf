"""Apple GPUs: Inductor's Metal code, kernels of ours, and torch's own operators.

Nothing here has run on a Mac. What torch gets wrong there by its own issues is data: `KNOWN_BUGS`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level
from lowering.targets.cuda import torch_minor
from lowering.targets.gpu import FLOATS

_MACOS = (13, 14, 15, 26)


@dataclass(frozen=True)
class KnownBug:
    """Operators whose Metal code by Inductor is wrong before a version of torch: the release that
    the issue names, or else the first one made after the fix."""

    ops: frozenset[str]
    right_from: tuple[int, int]
    issue: str
    what: str


KNOWN_BUGS = (
    KnownBug(
        frozenset(
            "layer_norm group_norm instance_norm batch_norm native_layer_norm native_batch_norm "
            "rms_norm var std var_mean std_mean".split()
        ),
        (2, 13),
        "pytorch#191976",
        "mean and variance together come out wrong, without a word",
    ),
    KnownBug(
        frozenset("sum mean prod nansum logsumexp norm vector_norm linalg_vector_norm".split()),
        (2, 11),
        "pytorch#170360",
        "sums over more than a thousand numbers come out as twice what they are",
    ),
)
_VERSIONS = tuple(sorted({bug.right_from for bug in KNOWN_BUGS}))


def probe() -> Probe:
    """A torch with Metal on a macOS that can use it. Never raises."""
    macos, _, machine = platform.mac_ver()
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
        details = _details(machine)
    except Exception as error:  # noqa: BLE001  (the driver's word becomes the reason)
        return Probe.no(f"MPS does not start: {type(error).__name__}: {error}")
    features = features_of(int(macos.split(".")[0]), machine, torch_minor())
    return Probe.yes(f"macOS {macos}", macos=macos, features=sorted(features), **details)


def _details(machine: str) -> dict[str, Any]:
    # Memory is shared with the CPU; Metal recommends how much of it a process should use.
    memory = getattr(torch.mps, "recommended_max_memory", None)
    return {
        "device_count": 1,
        "devices": [
            {
                "name": machine or platform.machine(),
                "memory_bytes": int(memory()) if memory is not None else 0,
            }
        ],
    }


def features_of(macos: int, machine: str, version: tuple[int, int]) -> frozenset[str]:
    """What rows may ask for: "macos14+", "apple7+" for Apple silicon, "torch2.13+"."""
    found = {f"macos{floor}+" for floor in _MACOS if macos >= floor}
    found |= {"apple7+"} if machine == "arm64" else set()
    found |= {_from(one) for one in _VERSIONS if version >= one}
    return frozenset(found)


def _from(version: tuple[int, int]) -> str:
    return f"torch{version[0]}.{version[1]}+"


def inductor_config(level: Level) -> Mapping[str, Any]:
    """Inductor would lay images channels last, which made compiled training on Metal 4 to 9 times
    slower than eager (pytorch#192551)."""
    return {"layout_optimization": False}


# --- rows -----------------------------------------------------------------------------------------

_NOT_IN_METAL = frozenset({"float64", "complex64", "complex128"})
_NEWEST = _from(_VERSIONS[-1])


def _inductor_row() -> CapabilityRow:
    needs = {
        (op, _from(bug.right_from), f"{bug.what} ({bug.issue})")
        for bug in KNOWN_BUGS
        for op in bug.ops
    }
    return CapabilityRow(
        "mps",
        "inductor",
        GRAPH,
        Level.O2,
        priority=50,
        refused_dtypes=_NOT_IN_METAL,
        op_features=frozenset(needs),
        negated=False,
        why="one Metal kernel for what eager launches one by one; torch calls it a prototype "
        "(pytorch#150121)",
    )


def _ours(region: str, level: Level, priority: int, why: str, **limits: Any) -> CapabilityRow:
    """A kernel of ours: inference, on what compiles bfloat and adds up within a simdgroup."""
    needs = frozenset({"macos14+", "apple7+"})
    return CapabilityRow(
        "mps",
        "metal",
        region,
        level,
        priority,
        dtypes=FLOATS,
        features=needs,
        training=False,
        why=why,
        **limits,
    )


def _left(region: str, why: str, early: bool = False) -> CapabilityRow:
    """Stays as it stands, where Inductor takes every graph."""
    features = frozenset({_NEWEST})
    return CapabilityRow(
        "mps", "inductor", region, Level.O2, 10, features=features, early=early, why=why
    )


TARGET = Target(
    name="mps",
    summary="Apple GPUs, through Inductor's Metal code, kernels of ours, and torch's own",
    device_types=("mps",),
    probe=probe,
    aliases=("metal", "apple"),
    priority=30,
    proven_on="never run on a Mac; plans by dry run, shaders compiled as C++ and run on a CPU",
    inductor_config=inductor_config,
    on_paper={
        "macos15": {"features": sorted(features_of(15, "arm64", (2, 13)))},
        "torch2.8": {"features": sorted(features_of(15, "arm64", (2, 8)))},
        "macos13": {"features": sorted(features_of(13, "arm64", (2, 8)))},
    },
    rows=(
        _inductor_row(),
        CapabilityRow(
            "mps",
            "eager",
            GRAPH,
            Level.O0,
            refused_dtypes=_NOT_IN_METAL,
            why="Metal has no float64, and torch's MPS kernels for complex numbers are partial",
        ),
        _ours(
            "attention",
            Level.O1,
            80,
            "one launch for a step of decoding, grouped heads and masks included, whatever the "
            "strides; torch's own was wrong for transposed queries in 2.8 (pytorch#163597) and for "
            "permuted ones until 2.12 (pytorch#181133)",
            shape_classes=frozenset({"decode"}),
            early=True,
        ),
        _ours(
            "rope",
            Level.O1,
            70,
            "query and key in one launch, computed in float32; torch launches ten",
        ),
        _ours(
            "norm",
            Level.O1,
            70,
            "addition, norm and weight in one launch, computed in float32, without Inductor's "
            "reductions, which were wrong (pytorch#170360) and slow (pytorch#150121)",
        ),
        _ours(
            "linear",
            Level.O3,
            60,
            "few rows are bound by reading the weight, and in int8 it is at most half as long; "
            "each layer is checked on its first inputs",
            error=0.01,
            shape_classes=frozenset({"vector", "small"}),
            min_flops=1 << 22,
            early=True,
        ),
        _left("attention", "with many queries it is torch's own kernel", early=True),
        _left("linear", "products are Apple's own", early=True),
        _left("convolution", "convolutions are Apple's own", early=True),
        _left("embedding", "a gather, which fuses with what follows it", early=True),
        _left("rope", "what our kernel does not take fuses with its neighbours"),
        _left("norm", "LayerNorm, and norms in training, stay with Inductor"),
        _left("gated", "fuses into one kernel"),
    ),
)
