"""Machines that are not this one, read through the same code; and this one, asked for real."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from lowering import machine
from lowering.machine import Sources, cpu_from

pytestmark = pytest.mark.quick

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
model\t\t: 17
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_vnni avx512_bf16 clflush

processor\t: 1
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_vnni avx512_bf16 clflush
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def linux(files: dict[str, str], cores: int = 16, affinity: int | None = None) -> Sources:
    return Sources(
        read=files.get, logical_cores=cores, affinity_cores=cores if affinity is None else affinity
    )


def v2(path: str, **files: str) -> dict[str, str]:
    base = {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": V2_MOUNT}
    return base | {name.replace("__", "/"): text for name, text in files.items()}


def test_x86_record() -> None:
    facts = cpu_from(linux({"/proc/cpuinfo": EPYC, "/proc/meminfo": "MemTotal:  1024 kB\n"}))
    assert (facts.vendor, facts.model) == ("amd", "AMD EPYC 9654 96-Core Processor")
    assert facts.isa == {"sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"}
    assert facts.memory_bytes == 1024 * 1024
    assert facts.cgroup_cores is None
    assert facts.effective_cores == 16


def test_arm_record_has_neon_under_both_names() -> None:
    facts = cpu_from(linux({"/proc/cpuinfo": GRAVITON}))
    assert (facts.vendor, facts.model) == ("arm", "Neoverse V1")
    assert {"neon", "asimd", "sve", "bf16", "i8mm"} <= facts.isa
    assert "avx2" not in facts.isa


def test_flags_of_a_hybrid_chip_are_those_of_every_core() -> None:
    efficient = EPYC.replace("avx512f avx512_vnni avx512_bf16 ", "", 1)
    assert "avx512f" not in cpu_from(linux({"/proc/cpuinfo": efficient})).isa


def test_macos_and_windows_and_silence_do_not_crash() -> None:
    nothing = Sources(read=lambda path: None, system="Plan9", logical_cores=0, affinity_cores=0)
    assert cpu_from(nothing).effective_cores == 1
    assert cpu_from(nothing).model == "unknown CPU"
    mac = Sources(
        read=lambda path: None,
        system="Darwin",
        processor="arm",
        logical_cores=8,
        affinity_cores=8,
        sysctl="machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_BF16: 1\n"
        "hw.optional.arm.AdvSIMD: 1\nhw.optional.arm.FEAT_SME: 0\n",
    )
    facts = cpu_from(mac)
    assert (facts.vendor, facts.model) == ("apple", "Apple M2")
    assert facts.isa == {"bf16", "asimd", "neon"}
    windows = dataclasses.replace(
        mac,
        system="Windows",
        sysctl="",
        processor="AMD64 Family 6 Model 85 Stepping 7, GenuineIntel",
        isa=frozenset({"fma3", "avx512_f", "avx2"}),
    )
    assert cpu_from(windows).vendor == "intel"
    assert cpu_from(windows).isa == {"fma", "avx512f", "avx2"}


def test_what_linux_does_not_list() -> None:
    """Linux names no products of float16 in tiles. Torch, which asks the CPU, does."""
    with_tiles = EPYC.replace("clflush", "clflush amx_tile amx_bf16")
    for text, found in ((with_tiles, {"amx_fp16"}), (EPYC, set())):
        told = dataclasses.replace(
            linux({"/proc/cpuinfo": text}), isa=frozenset({"amx_fp16", "avx512_fp16"})
        )
        assert cpu_from(told).isa & {"amx_fp16", "avx512_fp16"} == found


@pytest.mark.parametrize("found", [True, False])
def test_older_torch_is_asked_for_tiles_of_float16(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", None, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: found, raising=False)
    assert machine._torch_isa() == ({"amx_fp16"} if found else set())


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(2, None, 2), (16, 2.0, 2), (2, 8.0, 2), (16, 0.1, 1), (16, 2.5, 2), (16, 1.9, 2)],
)
def test_effective_cores(affinity: int, quota: float | None, expected: int) -> None:
    assert machine.effective_cores(affinity, quota) == expected


def test_the_tightest_quota_up_a_v2_hierarchy_counts() -> None:
    top = "/sys/fs/cgroup"
    files = v2("/pod/box/inner") | {
        f"{top}/pod/cpu.max": "200000 100000\n",
        f"{top}/pod/box/cpu.max": "max 100000\n",
        f"{top}/pod/box/inner/cpu.max": "800000 100000\n",
        f"{top}/pod/memory.max": "max\n",
        f"{top}/pod/box/memory.max": "4096\n",
        f"{top}/pod/box/inner/memory.max": "8192\n",
    }
    facts = cpu_from(linux(files))
    assert facts.cgroup_cores == 2.0
    assert facts.effective_cores == 2
    assert facts.memory_limit_bytes == 4096


def test_v2_inside_a_container_that_sees_the_host_path() -> None:
    files = {
        "/proc/self/cgroup": "0::/docker/abc/inner\n",
        "/proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /docker/abc /sys"),
        "/sys/fs/cgroup/inner/cpu.max": "300000 100000\n",
    }
    assert cpu_from(linux(files)).cgroup_cores == 3.0


def test_v1_quota_limit_and_the_number_that_means_no_limit() -> None:
    files = {
        "/proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNTS,
        # The host's path is not visible inside the container: its own group is the mount's root.
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    facts = cpu_from(linux(files))
    assert facts.cgroup_cores == 1.5
    assert facts.effective_cores == 1
    assert facts.memory_limit_bytes is None
    files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1\n"
    assert cpu_from(linux(files)).cgroup_cores is None


def test_affinity_and_quota_together() -> None:
    files = v2("/") | {"/sys/fs/cgroup/cpu.max": "400000 100000"}
    assert cpu_from(linux(files, affinity=2)).effective_cores == 2
    assert cpu_from(linux(files, affinity=8)).effective_cores == 4


def test_this_machine() -> None:
    facts = machine.cpu()
    assert 1 <= facts.effective_cores <= facts.logical_cores
    assert facts.memory_bytes > 1 << 28
    assert facts.isa, "no ISA flag known on this CPU"
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert {"avx2", "fma"} <= facts.isa
    if hasattr(os, "sched_getaffinity"):
        assert facts.affinity_cores == len(os.sched_getaffinity(0))
