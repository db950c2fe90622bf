"""The interface of every backend, and what follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from kernel_dispatch.backends.device_info import DeviceInfo
from kernel_dispatch.backends.levels import OptimizationLevel
from kernel_dispatch.backends.moving import each_tensor
from kernel_dispatch.config.dispatch import DispatchConfig
from lowering.errors import SettingError

B = TypeVar("B", bound="BaseBackend")
LevelLike = str | OptimizationLevel | None


class BaseBackend(ABC):
    """One vendor's devices: what they are, and models and tensors on them."""

    BACKEND_NAME: str = "base"

    def __init__(self, config: DispatchConfig | None = None) -> None:
        if config is not None and not isinstance(config, DispatchConfig):
            raise SettingError(
                f"config={config!r}: give a kernel_dispatch.config.DispatchConfig, such as "
                f'DispatchConfig(level="O1").'
            )
        self.config = config or DispatchConfig()
        self._device_id = 0
        self._infos: dict[int, DeviceInfo] = {}
        self._setup_environment()

    # --- what a vendor has to tell and to do ---

    @abstractmethod
    def _setup_environment(self) -> None:
        """Called once by the constructor. Must not change the process: no environment variable, no
        global setting of torch, no device started."""

    @abstractmethod
    def _check_availability(self) -> bool:
        """Is the hardware here, and does it answer?"""

    @abstractmethod
    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        """What is known of one device, whether it is here or not."""

    @abstractmethod
    def prepare_model(self, model: nn.Module, optimization_level: LevelLike = None) -> nn.Module:
        """The model on this backend's device, compiled at a level."""

    @abstractmethod
    def optimize_for_inference(
        self, model: nn.Module, sample_input: Any = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The model in evaluation mode, without gradients."""

    @abstractmethod
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """The model in training mode; with an optimizer, both."""

    # --- what follows ---

    @property
    def is_available(self) -> bool:
        return self._check_availability()

    @property
    def device(self) -> torch.device:
        """The device in use; `set_device` changes it."""
        return torch.device("cpu")

    @property
    def device_count(self) -> int:
        return int(self.is_available)

    def get_device_info(self, device_id: int = 0) -> DeviceInfo:
        """What is known of a device; asked once."""
        self._check_id(device_id)
        if device_id not in self._infos:
            self._infos[device_id] = self._get_device_info(device_id)
        return self._infos[device_id]

    def get_device_info_dict(self, device_id: int = 0) -> dict[str, Any]:
        """The same as a dict, for code that was written for one."""
        return self.get_device_info(device_id).to_dict()

    def to_device(self, value: Any) -> Any:
        """A tensor, a module, or whatever holds tensors, where models of this backend want it."""
        if isinstance(value, nn.Module):
            return value.to(self.device)
        return each_tensor(value, lambda tensor: tensor.to(self.device))

    def set_device(self, device_id: int) -> None:
        """Use another device from now on. torch's own current device stays what it is."""
        self._check_id(device_id)
        self._device_id = device_id

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given; calls on the CPU are done."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)

    def empty_cache(self) -> None:
        """Give back device memory that torch keeps and nobody uses; of the CPU's it keeps none."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        self.empty_cache()
        return False  # an exception passes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.device}>"

    def _check_id(self, device_id: int) -> None:
        count = max(1, self.device_count)  # a device that is absent can be asked about, as number 0
        if isinstance(device_id, bool) or not isinstance(device_id, int):
            raise SettingError(f"device_id={device_id!r}: give a whole number from 0 on.")
        if not 0 <= device_id < count:
            raise SettingError(
                f"device_id={device_id!r}: {self.BACKEND_NAME} has {count} device(s), numbered "
                f"from 0."
            )
