"""What the CPU of this machine is: ISA, and the cores and memory that we may use.

Everything is read on demand and nothing is changed. What the operating system says comes in through
`Sources`, so that tests can hand in any machine.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

Read = Callable[[str], "str | None"]  # the text of a file; None where it cannot be read


@dataclass(frozen=True)
class CpuFacts:
    """The CPU, and how much of it this process may use."""

    vendor: str  # intel, amd, arm, apple ...; empty if unknown
    model: str
    isa: frozenset[str]
    logical_cores: int
    affinity_cores: int
    cgroup_cores: float | None  # the tightest CPU quota up the hierarchy; None: no quota
    effective_cores: int
    memory_bytes: int
    memory_limit_bytes: int | None  # the tightest cgroup limit; None: no limit

    @property
    def ends_at_avx2(self) -> bool:
        """Has it vectors of 256 bits of x86, and no wider ones?"""
        return "avx2" in self.isa and "avx512f" not in self.isa


@dataclass(frozen=True)
class Sources:
    """What the operating system says about itself."""

    read: Read
    system: str = "Linux"  # as platform.system()
    processor: str = ""  # the best name that is known without reading any file
    logical_cores: int = 1
    affinity_cores: int = 1
    memory_bytes: int = 0  # used where there is no /proc/meminfo
    sysctl: str = ""  # macOS: `sysctl hw machdep.cpu`
    isa: frozenset[str] = frozenset()  # what torch found; used for what the system does not list


# --- CPU ------------------------------------------------------------------------------------------

# The names that capability rows may use. Kernels know a hundred more that decide nothing here.
_X86_NAMES = (
    "sse4_1 sse4_2 avx avx2 fma f16c avx_vnni avx512f avx512bw avx512cd avx512dq avx512vl "
    "avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8 amx_fp16"
)
_ARM_NAMES = "neon asimd asimdhp asimddp sve sve2 sme sme2 bf16 i8mm"
ISA_NAMES = frozenset(_X86_NAMES.split()) | frozenset(_ARM_NAMES.split())
# Other spellings of the same thing: torch's capability names, macOS's FEAT_ names, 64-bit ARM.
_ISA_SPELLINGS = {
    "fma3": "fma",
    "avx512_f": "avx512f",
    "avx512_bw": "avx512bw",
    "avx512_cd": "avx512cd",
    "avx512_dq": "avx512dq",
    "avx512_vl": "avx512vl",
    "avx1.0": "avx",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "feat_bf16": "bf16",
    "feat_i8mm": "i8mm",
    "feat_fp16": "asimdhp",
    "feat_dotprod": "asimddp",
    "feat_sme": "sme",
    "feat_sme2": "sme2",
    "advsimd": "asimd",
}
_VENDORS = {
    "genuineintel": "intel",
    "authenticamd": "amd",
    "hygongenuine": "hygon",
    "0x41": "arm",
    "0x46": "fujitsu",
    "0x48": "hisilicon",
    "0x4e": "nvidia",
    "0x51": "qualcomm",
    "0x61": "apple",
    "0x6d": "microsoft",
    "0xc0": "ampere",
}
# ARM kernels print a part number where x86 prints a name.
_ARM_PARTS = {
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@functools.cache
def cpu() -> CpuFacts:
    """This machine, read once."""
    return cpu_from(_sources())


def cpu_from(sources: Sources) -> CpuFacts:
    """The facts in what the system says. Pure: nothing is cached and nothing else is asked."""
    info = _cpuinfo(sources.read("/proc/cpuinfo") or "")
    sysctl = _colon_lines(sources.sysctl)
    quota = min(_cpu_quotas(sources.read), default=None)
    affinity = max(1, sources.affinity_cores)
    return CpuFacts(
        vendor=_vendor(info, sysctl, sources),
        model=_model(info, sysctl, sources),
        isa=_isa(info, sysctl, sources),
        logical_cores=max(1, sources.logical_cores),
        affinity_cores=affinity,
        cgroup_cores=quota,
        effective_cores=effective_cores(affinity, quota),
        memory_bytes=_memory(sources),
        memory_limit_bytes=min(_memory_limits(sources.read), default=None),
    )


def effective_cores(affinity: int, quota: float | None) -> int:
    """Threads that can run at once. Of a part of a core only a large one counts: with 3 threads on
    a quota of 2.5 the kernel stops all of them for a sixth of each period."""
    if quota is None:
        return max(1, affinity)
    return max(1, min(affinity, int(quota + 0.25)))


def _sources() -> Sources:
    system = platform.system()
    linux = system == "Linux"
    return Sources(
        read=read_text,
        system=system,
        processor=platform.processor() or platform.machine(),
        logical_cores=os.cpu_count() or 1,
        affinity_cores=_affinity(),
        memory_bytes=0 if linux else _system_memory(),
        sysctl=_run_sysctl() if system == "Darwin" else "",
        isa=_torch_isa(),
    )


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or not ours to read: the caller has a default
        return None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _system_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0


def _run_sysctl() -> str:
    try:
        command = ["/usr/sbin/sysctl", "hw", "machdep.cpu"]
        # sysctl exits with 1 when one of many keys is not readable; what it printed is good.
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _torch_isa() -> frozenset[str]:
    """ISA flags from torch's own CPU detection."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.10 and later
    if capabilities is not None:
        return _normalised(name for name, value in capabilities().items() if value is True)
    in_tiles = getattr(torch.cpu, "_is_amx_fp16_supported", None)
    return frozenset({"amx_fp16"}) if in_tiles is not None and in_tiles() else frozenset()


def _colon_lines(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _cpuinfo(text: str) -> dict[str, str]:
    """/proc/cpuinfo as one record. Flags are those that *every* core has: a kernel may run on any
    core of a hybrid chip."""
    blocks = [_colon_lines(block) for block in re.split(r"\n\s*\n", text)]
    merged: dict[str, str] = {}
    for block in blocks:
        for key, value in block.items():
            if key in ("flags", "features") and key in merged:
                value = " ".join(set(merged[key].split()) & set(value.split()))
            elif key in merged:
                continue
            merged[key] = value
    return merged


def _vendor(info: Mapping[str, str], sysctl: Mapping[str, str], sources: Sources) -> str:
    known = info.get("vendor_id") or info.get("cpu implementer") or sysctl.get("machdep.cpu.vendor")
    if known:
        return _VENDORS.get(known.lower(), known.lower())
    text = f"{sysctl.get('machdep.cpu.brand_string', '')} {sources.processor}".lower()
    return next((name for name in ("intel", "amd", "apple") if name in _words(text)), "")


def _words(text: str) -> set[str]:
    """`AuthenticAMD` in a Windows processor string names AMD; `amd64` alone is an architecture."""
    return set(re.findall(r"[a-z]+\d*", text.replace("genuine", " ").replace("authentic", " ")))


def _model(info: Mapping[str, str], sysctl: Mapping[str, str], sources: Sources) -> str:
    part = info.get("cpu part", "")
    named = (
        info.get("model name"),
        sysctl.get("machdep.cpu.brand_string"),
        _ARM_PARTS.get(part.lower()),
        info.get("model") if "cpu implementer" in info else None,  # a board's name; x86: a number
        info.get("cpu"),  # POWER
        sources.processor,
    )
    return next((name for name in named if name), "unknown CPU")


def _isa(info: Mapping[str, str], sysctl: Mapping[str, str], sources: Sources) -> frozenset[str]:
    listed = f"{info.get('flags', '')} {info.get('features', '')}".split()
    listed += sysctl.get("machdep.cpu.features", "").split()
    listed += sysctl.get("machdep.cpu.leaf7_features", "").split()
    listed += [key.rpartition(".")[2] for key, on in sysctl.items() if on == "1" and ".arm." in key]
    found, torchs = _normalised(listed), _normalised(sources.isa)
    if not found or sources.system != "Linux":
        return found | torchs
    # The one that Linux's list leaves out. Where Linux has no tiles it is of no use.
    return found | (torchs & {"amx_fp16"} if "amx_tile" in found else frozenset())


def _normalised(names: Iterable[str]) -> frozenset[str]:
    found = {_ISA_SPELLINGS.get(name.lower(), name.lower()) for name in names} & ISA_NAMES
    if found & {"asimd", "neon"}:
        # 64-bit ARM calls it asimd and 32-bit ARM neon; rows that want NEON mean either.
        found.add("neon")
    return frozenset(found)


def _memory(sources: Sources) -> int:
    line = _colon_lines(sources.read("/proc/meminfo") or "").get("memtotal", "")
    if match := re.match(r"(\d+) kB", line):
        return int(match[1]) * 1024
    return sources.memory_bytes


# --- cgroups: the tightest limit on the way up counts ---------------------------------------------


def _cpu_quotas(read: Read) -> Iterator[float]:
    for group in _cgroups(read, ""):  # version 2: "max 100000", "200000 100000"
        quota, _, period = (read(f"{group}/cpu.max") or "").partition(" ")
        yield from _ratio(quota, period)
    for group in _cgroups(read, "cpu"):
        quota = read(f"{group}/cpu.cfs_quota_us") or ""  # -1: no quota
        yield from _ratio(quota, read(f"{group}/cpu.cfs_period_us") or "")


def _ratio(quota: str, period: str) -> Iterator[float]:
    if quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0 and int(quota) > 0:
        yield int(quota) / int(period)


def _memory_limits(read: Read) -> Iterator[int]:
    files = [f"{group}/memory.max" for group in _cgroups(read, "")]
    files += [f"{group}/memory.limit_in_bytes" for group in _cgroups(read, "memory")]
    for path in files:
        text = (read(path) or "").strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            yield int(text)


def _cgroups(read: Read, controller: str) -> list[str]:
    """The directories of this process's cgroup and of all above it; "" is the v2 hierarchy."""
    path = _cgroup_path(read("/proc/self/cgroup") or "", controller)
    if path is None:
        return []
    folders: list[str] = []
    for root, mount in _cgroup_mounts(read("/proc/self/mountinfo") or "", controller):
        # In a container the mount shows the tree from `root` down, and the path may be the host's.
        inside = path.removeprefix(root) if root != "/" else path
        steps = [part for part in PurePosixPath(inside).parts if part not in ("/", "..")]
        folders += ["/".join([mount, *steps[:depth]]) for depth in range(len(steps), -1, -1)]
    return folders


def _cgroup_path(text: str, controller: str) -> str | None:
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(","):
            return fields[2]
    return None


def _cgroup_mounts(text: str, controller: str) -> list[tuple[str, str]]:
    """(root, mount point) of a hierarchy; the usual places where mountinfo does not tell."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        first = kind[0] == "cgroup" and controller in kind[2].split(",")
        if (first and controller) or (kind[0] == "cgroup2" and not controller):
            found.append((place[3], place[4]))
    return found or [("/", f"/sys/fs/cgroup/{controller}".rstrip("/"))]
