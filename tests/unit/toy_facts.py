"""Facts about machines that do not exist, for the tests of `doctor`."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernel_dispatch.diagnosis import BACKEND, Facts, Row, Setting, diagnose
from kernel_dispatch.options import OPTIONS
from lowering.contract import Probe, Provider, Target
from lowering.libraries import Library
from lowering.machine import CpuFacts
from triton_kernels.availability import TritonStatus

OURS = f"{BACKEND} from kernel-dispatch 0.1.0"
CPU = CpuFacts(
    vendor="amd",
    model="AMD EPYC 9654",
    isa=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    logical_cores=96,
    affinity_cores=16,
    cgroup_cores=2.5,
    effective_cores=2,
    memory_bytes=64 << 30,
    memory_limit_bytes=8 << 30,
)


def target(name: str, found: Probe, priority: int = 10) -> tuple[Target, Probe]:
    return Target(name, f"toy {name}", (name,), lambda: found, (), priority=priority), found


def provider(name: str, found: Probe) -> tuple[Provider, Probe]:
    return Provider(name, f"toy {name}", lambda: found), found


def setting(name: str, value: Any, source: str = "default", error: str = "") -> Setting:
    env = next(option.env for option in OPTIONS if option.name == name)
    return Setting(name, env, value, source, error)


HEALTHY = Facts(
    python="3.11.7",
    torch="2.13.0+cpu",
    window=((2, 8), (2, 16)),
    entry_points=(OURS,),
    cpu=CPU,
    threads=2,
    libraries=(
        Library("torch", "2.13.0", "CPU kernels: AVX512"),
        Library("MKL", "2024.2", "BLAS of this build: mkl"),
        Library("NNPACK", "", "not in this build of torch", available=False),
    ),
    compiler=Probe.yes("g++ 12.2.0", compiler="/usr/bin/g++"),
    triton=TritonStatus(False, "", False, False, "", "triton does not import"),
    targets=(
        target("cuda", Probe.no("this torch is a CPU build", "pip install CUDA")),
        target("cpu", Probe.yes("AMD EPYC")),
    ),
    providers=(
        provider("eager", Probe.yes("2.13.0")),
        provider("mkldnn", Probe.no("built without")),
        provider("ipex", Probe.no("IPEX is not installed, and nothing is missing")),
    ),
    settings=(
        setting("level", "O2"),
        setting("device", "auto"),
        setting("strict", False),
        setting("disable", []),
        setting("threads", None),
    ),
)


def with_setting(name: str, value: Any, source: str = "env", error: str = "", **more: Any) -> Facts:
    kept = tuple(one for one in HEALTHY.settings if one.name != name)
    changed = (*kept, setting(name, value, source, error))
    return dataclasses.replace(HEALTHY, settings=changed, **more)


def replaced(**more: Any) -> Facts:
    return dataclasses.replace(HEALTHY, **more)


def rows_of(facts: Facts) -> dict[str, Row]:
    return {row.name: row for row in diagnose(facts)}


def row_of(facts: Facts, name: str) -> Row:
    return rows_of(facts)[name]


NO_COMPILER = Probe.no("no working C++ compiler (CXX=/nonexistent)", "apt-get install -y g++")
