"""Memory by address: each block is a tensor of bytes, held until it is given back."""

from __future__ import annotations

import threading

import torch

from lowering.errors import SettingError


class Blocks:
    """What one provider has allocated."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int, device: torch.device, most: int) -> int:
        _demand_size(size, most)
        block = torch.empty(size, dtype=torch.uint8, device=device)
        with self._lock:
            self._held[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, ptr: int) -> None:
        with self._lock:
            found = self._held.pop(ptr, None) if isinstance(ptr, int) else None
        if found is None:
            raise SettingError(
                f"free_memory({_shown(ptr)}): nothing is allocated there; it was freed before, or "
                f"it is no address that allocate_memory() of this provider gave."
            )

    def view(self, ptr: int) -> torch.Tensor:
        """The block as a tensor of bytes."""
        with self._lock:
            if ptr not in self._held:
                raise SettingError(f"{_shown(ptr)}: nothing is allocated there.")
            return self._held[ptr]

    @property
    def total(self) -> int:
        with self._lock:
            return sum(block.numel() for block in self._held.values())


def _demand_size(size: int, most: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise SettingError(f"allocate_memory({size!r}): give a whole number of bytes.")
    if size <= 0:
        raise SettingError(f"allocate_memory({size}): give a number of bytes above 0.")
    if size > most:
        raise SettingError(f"allocate_memory({size}): the device has {most} bytes in all.")


def _shown(ptr: object) -> str:
    return hex(ptr) if isinstance(ptr, int) and not isinstance(ptr, bool) else repr(ptr)
