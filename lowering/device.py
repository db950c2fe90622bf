"""One device as a value: `Device(DeviceType.Cuda, 1)`, and the way to torch.device and back.

Torch calls a GPU of either maker "cuda". Which one it is, is a fact of the torch that is installed,
so a Hip device is one only under a torch that was built for ROCm.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from lowering import targets
from lowering.errors import BackendNotAvailableError, SettingError, unknown


class DeviceType(str, enum.Enum):
    """The kinds of device that the layer rules name."""

    Cpu = "cpu"
    Cuda = "cuda"
    Hip = "hip"

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def _missing_(cls, value: object) -> DeviceType:
        """Any spelling that the rest of the project takes: "HIP", "rocm", "nvidia", "host"."""
        target = targets.resolve_name(str(value).strip())
        if target not in _OF_TARGET:
            raise unknown("device type", value, [kind.value for kind in cls])
        return _OF_TARGET[target]


_OF_TARGET: dict[str | None, DeviceType] = {
    "cpu": DeviceType.Cpu,
    "cuda": DeviceType.Cuda,
    "rocm": DeviceType.Hip,
}


@dataclass(frozen=True)
class Device:
    """A device by type and number. It says nothing of whether there is one."""

    type: DeviceType
    device_id: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", DeviceType(self.type))
        number = self.device_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise SettingError(f"device_id={number!r}: give a whole number >= 0.")
        if self.type is DeviceType.Cpu and number:
            raise SettingError(f"device_id={number}: torch has one CPU device, number 0.")

    @classmethod
    def of(cls, given: Any) -> Device:
        """From a torch.device, a name ("cuda:1", "hip", "nvidia:0"), or a Device."""
        if isinstance(given, cls):
            return given
        if isinstance(given, torch.device):
            return cls(_type_of(given), _number_of(given))
        if not isinstance(given, str):
            raise SettingError(
                f"device {given!r} is of type {type(given).__name__}: give a name such as "
                f"'cuda:1', a torch.device or a Device."
            )
        name, colon, number = given.strip().partition(":")
        if colon and not (number.isascii() and number.isdigit()):
            raise SettingError(f"device {given!r}: the number after the colon must be >= 0.")
        return cls(DeviceType(name), int(number or 0))

    @property
    def torch(self) -> torch.device:
        """What torch calls it; an error where this torch was built for the other maker."""
        if self.type is DeviceType.Cpu:
            return torch.device("cpu")
        if (self.type is DeviceType.Hip) != _is_rocm():
            raise BackendNotAvailableError(
                f"device '{self}' does not exist in torch {torch.__version__}, which was built for "
                f"{_built_for()}."
            )
        return torch.device("cuda", self.device_id)

    def __str__(self) -> str:
        return f"{self.type}:{self.device_id}"


def _type_of(given: torch.device) -> DeviceType:
    if given.type == "cuda":
        return DeviceType.Hip if _is_rocm() else DeviceType.Cuda
    if given.type == "cpu":
        return DeviceType.Cpu
    raise unknown("device type", given.type, [kind.value for kind in DeviceType], repr(given))


def _number_of(given: torch.device) -> int:
    """Without an index torch means the current device, which is 0 until CUDA was started."""
    if given.index is not None:
        return 0 if given.type == "cpu" else given.index
    started = given.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.current_device() if started else 0


def _is_rocm() -> bool:
    return getattr(torch.version, "hip", None) is not None


def _built_for() -> str:
    if _is_rocm():
        return f"ROCm {torch.version.hip}: its GPUs are of type hip"
    cuda = getattr(torch.version, "cuda", None)
    return f"CUDA {cuda}" if cuda else "CPUs only, not for ROCm"
