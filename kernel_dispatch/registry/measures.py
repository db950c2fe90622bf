"""How large and of what kind a target's device is: asked of the machine, and of tables only where
the machine does not say."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from kernel_dispatch.config.limits import LIMITS, Limits
from kernel_dispatch.registry.table import OWN_TARGET
from lowering import machine
from lowering.contract import Probe

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
# The widest vectors that instructions of this name compute on, in bits; SVE's vary by machine.
_VECTOR_BITS = (("avx512f", 512), ("avx2", 256), ("avx", 256), ("sse4_1", 128), ("neon", 128))


def max_memory(target: str, found: Probe) -> int:
    """Bytes: of the smallest of several devices, of a container what it may use."""
    if target == "cpu":
        facts = machine.cpu()
        known = [facts.memory_bytes, facts.memory_limit_bytes or 0]
    else:
        known = [_memory_of(one) for one in found.details.get("devices", ())]
    return min(filter(None, known), default=_limits(target).memory)


def max_shared_memory(target: str) -> int:
    """Bytes that a group of threads shares on a GPU; the largest cache of a CPU."""
    found = _largest_cache() if target == "cpu" else _of_gpu(target, _SHARED)
    return found or _limits(target).shared


def compute_units(target: str, found: Probe) -> int:
    """Cores that this process may use; a GPU's multiprocessors; 0 where nothing tells."""
    if not found.available:
        return 0
    if target == "cpu":
        return machine.cpu().effective_cores
    if target == "mps":
        try:
            return int(torch.backends.mps.get_core_count())
        except (AttributeError, RuntimeError):  # torch before 2.10, or built without Metal
            return 0
    return _of_gpu(target, ("multi_processor_count",))


def compute_capability(target: str, found: Probe) -> int:
    """90 for NVIDIA's 9.0; of a CPU, the bits of its widest vectors; 0 for what counts neither."""
    if target == "cpu":
        isa = machine.cpu().isa
        return next((bits for name, bits in _VECTOR_BITS if name in isa), 64)
    archs = [str(_get(one, "arch")) for one in found.details.get("devices", ())]
    numbers = [int(arch[2:]) for arch in archs if re.fullmatch(r"sm\d+", arch)]
    return min(numbers, default=0)


def device_count(target: str, found: Probe) -> int:
    if not found.available:
        return 0
    return int(found.details.get("device_count", 1))


def _limits(target: str) -> Limits:
    """A target without figures of its own is taken for the GPU that the seed's figures are of."""
    name = next((name for name, own in OWN_TARGET.items() if own == target), "cuda")
    return LIMITS[name]


def _memory_of(device: object) -> int:
    return int(_get(device, "memory_bytes") or 0)


def _get(device: object, name: str) -> Any:
    return device.get(name, "") if isinstance(device, dict) else ""


_SHARED = ("shared_memory_per_block_optin", "shared_memory_per_block")


def _of_gpu(target: str, names: tuple[str, ...]) -> int:
    """The first of these properties that the driver tells; 0 where there is no driver."""
    if target not in ("cuda", "rocm"):
        return 0
    try:
        properties = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError):  # no driver; a build without CUDA asserts
        return 0
    return next((int(n) for name in names if (n := getattr(properties, name, 0))), 0)


def _largest_cache() -> int:
    """From the C library, or from Linux itself: containers and ARM often lack the first."""
    for level in (4, 3, 2):
        try:
            size = os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")
        except (AttributeError, ValueError, OSError):
            size = 0
        if size > 0:
            return size
    texts = [machine.read_text(f"{_CACHES}/index{index}/size") or "" for index in range(5)]
    return max(map(_bytes, texts))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(match[1]) * _SUFFIXES.get(match[2], 1) if match else 0
