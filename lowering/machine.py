"""What the CPU side of this machine is: cores and memory that we may use, ISA, compiler, libraries.

Everything is read on demand and nothing is changed: no thread count, no environment variable. What
the operating system says comes in through `Sources`, so that tests can hand in any machine.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lowering.contract import Probe

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
    isa: frozenset[str] = frozenset()  # what torch found; used where the system has no list


@dataclass(frozen=True)
class Library:
    """A CPU library that torch was built with (or not)."""

    name: str
    version: str
    detail: str
    available: bool = True


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
        read=_read_text,
        system=system,
        processor=platform.processor() or platform.machine(),
        logical_cores=os.cpu_count() or 1,
        affinity_cores=_affinity(),
        memory_bytes=0 if linux else _system_memory(),
        sysctl=_run_sysctl() if system == "Darwin" else "",
        isa=frozenset() if linux else _torch_isa(),
    )


def _read_text(path: str) -> str | None:
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
    """ISA flags from torch's own CPU detection, on systems without /proc/cpuinfo."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.10 and later
    found = capabilities() if capabilities is not None else {}
    return _normalised(name for name, value in found.items() if value is True)


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
    return _normalised(listed) | _normalised(sources.isa)


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


# --- the C++ compiler -----------------------------------------------------------------------------

_COMPILER_PACKAGES = {
    "apt-get": "apt-get install -y g++",
    "dnf": "dnf install -y gcc-c++",
    "yum": "yum install -y gcc-c++",
    "zypper": "zypper install -y gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S --noconfirm gcc",
}
_HEADER_PACKAGES = {
    "apt-get": "apt-get install -y python{version}-dev",
    "dnf": "dnf install -y python{version}-devel",
    "yum": "yum install -y python{version}-devel",
    "zypper": "zypper install -y python{digits}-devel",
    "apk": "apk add python3-dev",
}


def toolchain() -> Probe:
    """Is there a C++ compiler that Inductor will find, and Python's headers? Compiles nothing."""
    from torch._inductor import config

    # Inductor reads CXX once, when it is imported: its own search list is part of the question.
    return _toolchain(os.environ.get("CXX"), str(config.cpp.cxx))


@functools.cache
def _toolchain(cxx: str | None, search: str) -> Probe:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except (RuntimeError, OSError) as error:
        # InvalidCxxCompiler is a RuntimeError; a CXX that is no executable is an OSError.
        wish = f" (CXX={cxx})" if cxx else ""
        return Probe.no(f"no working C++ compiler{wish}: {error}", compiler_fix(cxx))
    include = _python_include()
    if not (include / "Python.h").is_file():
        return Probe.no(f"Python.h is not in {include}", headers_fix(), compiler=compiler)
    where = shutil.which(compiler) or compiler
    return Probe.yes(_compiler_version(compiler), compiler=where, include=str(include))


def _python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not include.exists() and sys.platform == "darwin":
        # As in Inductor: a framework build of Python keeps its headers elsewhere.
        include = (Path(sysconfig.get_path("stdlib")).parent.parent / "Headers").absolute()
    return include


def _compiler_version(compiler: str) -> str:
    if sys.platform == "win32":
        return compiler  # cl prints its version on stderr only, together with an error
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return compiler
    return next(iter(shown.stdout.splitlines()), compiler)


def compiler_fix(cxx: str | None = None, system: str | None = None) -> str:
    """The command that gives this system a C++ compiler."""
    system = system or platform.system()
    install = {
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools --override "
        '"--quiet --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended", '
        'then start from the "x64 Native Tools Command Prompt"',
    }.get(system) or _packaged(_COMPILER_PACKAGES, "conda install -y -c conda-forge gxx")
    if cxx:
        return f"Set CXX to a working compiler or unset it (`unset CXX`); to install one: {install}"
    return install


def headers_fix(system: str | None = None) -> str:
    """The command that brings Python.h for this interpreter."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    anywhere = f"uv python install {version}"  # comes with its headers on every system
    if (system or platform.system()) != "Linux":
        return anywhere
    return _packaged(_HEADER_PACKAGES, anywhere).format(
        version=version, digits=version.replace(".", "")
    )


def _packaged(packages: Mapping[str, str], otherwise: str) -> str:
    command = next((line for tool, line in packages.items() if shutil.which(tool)), None)
    if command is None:
        return otherwise
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return command if root else f"sudo {command}"


_TINY = '#include <Python.h>\n#include <vector>\nextern "C" int tiny() { return 1; }\n'


def toolchain_deep() -> Probe:
    """Really compile a tiny shared library with Inductor's own flags. Loads nothing; for doctor."""
    quick = toolchain()
    if not quick.available:
        return quick
    with tempfile.TemporaryDirectory(prefix="unified-toolchain-") as folder:
        source = Path(folder) / "tiny.cpp"
        source.write_text(_TINY, encoding="utf-8")
        try:
            built = _build(source, folder)
        except Exception as error:  # noqa: BLE001  (whatever it is, Inductor would meet it too)
            return Probe.no(
                f"{quick.version} cannot build a shared library: {_shortened(str(error))}",
                compiler_fix(os.environ.get("CXX")),
                **quick.details,
            )
        if not built.is_file():
            return Probe.no(f"{quick.version} reported success but wrote no library")
    return quick


def _build(source: Path, folder: str) -> Path:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    builder = CppBuilder("tiny", str(source), CppTorchOptions(), output_dir=folder)
    builder.build()
    return Path(builder.get_target_file_path())


def _shortened(text: str, lines: int = 12) -> str:
    """The end of a compiler's output says what is wrong; the command line before it is long."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-lines:])


# --- libraries and threads ------------------------------------------------------------------------


def libraries() -> tuple[Library, ...]:
    """The CPU libraries that this torch was built with, and the ISA that its own kernels use."""
    shown, parallel = torch.__config__.show(), torch.__config__.parallel_info()
    text = f"{shown}\n{parallel}"
    backends: Any = torch.backends
    return (
        Library("torch", torch.__version__, f"CPU kernels: {backends.cpu.get_cpu_capability()}"),
        _library(
            "MKL", backends.mkl, text, r"Math Kernel Library Version ([\d.]+)", _setting("BLAS")
        ),
        _library("oneDNN", backends.mkldnn, text, r"MKL-DNN v(\S+)", "torch.backends.mkldnn"),
        _library(
            "OpenMP",
            backends.openmp,
            text,
            r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)",
            f"ATen parallel backend: {_found(r'ATen parallel backend: (.+)', parallel)}",
        ),
        _library("NNPACK", backends.nnpack, text, "", "float32 convolutions"),
    )


def _library(name: str, backend: Any, text: str, pattern: str, detail: str) -> Library:
    if not backend.is_available():
        return Library(name, "", "not in this build of torch", available=False)
    return Library(name, _found(pattern, text) if pattern else "", detail)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""


def _setting(name: str) -> str:
    value = _found(rf"{name}_INFO=(\w+)", torch.__config__.show())
    return f"{name} of this build: {value}" if value else ""


def thread_advice(
    threads: int | None = None,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """One sentence when torch's thread count does not fit the cores that we may use, else empty."""
    threads = torch.get_num_threads() if threads is None else threads
    cores = cpu().effective_cores if cores is None else cores
    ranks = _ranks(environ)
    share = max(1, cores // ranks)
    each = f" for each of {ranks} local ranks" if ranks > 1 else ""
    todo = f'pass options={{"threads": {share}}}, or set OMP_NUM_THREADS={share} before starting'
    if threads > share:
        return (
            f"torch uses {threads} threads and this process may use {share} core(s){each}: "
            f"oversubscribed threads wait for each other; {todo}."
        )
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if threads == 1 and share > 1 and environ.get(name, "").strip() == "1":
            return (
                f"{name}=1, often left over from a container image, holds torch to one thread "
                f"while this process may use {share} cores{each}; {todo}."
            )
    return ""


def _ranks(environ: Mapping[str, str]) -> int:
    """Ranks on this machine: torchrun sets OMP_NUM_THREADS=1 on purpose where they share cores."""
    value = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdigit() else 1
