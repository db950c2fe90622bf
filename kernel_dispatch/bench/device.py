"""The device that a run is on: is it there, wait for it, how much memory was used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import torch

from lowering.errors import SettingError, unknown


def demand(name: str) -> str:
    """The device's name in torch's spelling; an error that lists what is here if it is not."""
    here = present()
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        device = None
    if device is not None and (str(device) in here or (device.type in here and _exists(device))):
        return str(device)
    if device is not None:
        raise SettingError(
            f"there is no device {name!r} here (from --devices). Here: {', '.join(here)}."
        )
    raise unknown("device", name, here, "--devices")


def present() -> list[str]:
    """Types of device that torch can use here."""
    return ["cpu", *(kind for kind in ("cuda", "xpu", "mps") if _module(kind).is_available())]


def _exists(device: torch.device) -> bool:
    return device.index is None or (
        device.type != "cpu" and device.index < _module(device.type).device_count()
    )


def synchronize(device: str) -> None:
    if device != "cpu":
        _module(torch.device(device).type).synchronize()


def _module(kind: str) -> Any:
    return getattr(torch, kind)


class PeakMemory:
    """Bytes in use at the worst moment since this was made, above those in use when it was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = 0
        if device == "cpu":
            self._can = _reset_high_water()
            self._before = _status("VmRSS")
        else:
            module = _module(torch.device(device).type)
            self._can = hasattr(module, "reset_peak_memory_stats")
            if self._can:
                module.reset_peak_memory_stats(device)
                self._before = module.memory_allocated(device)

    def bytes(self) -> int | None:
        if not self._can:
            return None
        if self._device == "cpu":
            return max(0, _status("VmHWM") - self._before)
        peak: int = _module(torch.device(self._device).type).max_memory_allocated(self._device)
        return peak - self._before


def give_back_memory() -> None:
    """To the system: what is kept makes the next case seem to need less than it does."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another allocator than glibc's
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water() -> bool:
    """Linux keeps the largest resident size of a process and lets the process itself reset it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
