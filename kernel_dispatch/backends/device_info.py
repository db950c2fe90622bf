"""What a backend tells of one of its devices."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

from lowering.errors import nearest


@dataclass
class DeviceInfo:
    """One device. Where it is not here, `is_available` is False and `properties` say why."""

    backend: str  # nvidia, amd, tpu, intel, mps, cpu
    device_type: str  # as torch writes it: "cuda:0", "xla:0", "xpu:0", "mps:0", "cpu"
    device_id: int
    device_name: str
    compute_capability: str | None  # NVIDIA's, such as "9.0"
    total_memory_bytes: int  # 0 where nobody tells
    driver_version: str | None  # of the driver where torch tells it, else of the runtime
    is_available: bool
    properties: dict[str, Any]

    @property
    def total_memory_gb(self) -> float:
        return self.total_memory_bytes / 1024**3

    @property
    def total_memory_mb(self) -> float:
        return self.total_memory_bytes / 1024**2

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can carry them."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in fields.items()}

    # Once a dict was given here: code from then still works, and is told.

    def __getitem__(self, name: str) -> Any:
        _warn(f"info[{name!r}]")
        if not self._has(name):
            guess = nearest(str(name), self.__dict__)
            hint = f"did you mean {guess!r}?" if guess else f"it has {', '.join(self.__dict__)}"
            raise KeyError(f"{name!r} is no field of DeviceInfo; {hint}")
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        _warn(f"info.get({name!r})")
        return getattr(self, name) if self._has(name) else default

    def __contains__(self, name: object) -> bool:
        _warn(f"{name!r} in info")
        return self._has(name)

    def __iter__(self) -> Iterator[str]:
        _warn("iter(info)")
        return iter(self.to_dict())

    def keys(self) -> KeysView[str]:
        _warn("info.keys()")
        return self.to_dict().keys()

    def values(self) -> ValuesView[Any]:
        _warn("info.values()")
        return self.to_dict().values()

    def items(self) -> ItemsView[str, Any]:
        _warn("info.items()")
        return self.to_dict().items()

    def _has(self, name: object) -> bool:
        return name in self.__dict__ or name in ("total_memory_gb", "total_memory_mb")


def _warn(use: str) -> None:
    warnings.warn(
        f"{use}: device information is a DeviceInfo, no longer a dict. Use its attributes, or "
        f"get_device_info_dict().",
        DeprecationWarning,
        stacklevel=3,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
