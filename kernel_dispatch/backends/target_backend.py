"""A backend over one of our targets: `torch.compile(backend="unified")` and the target's probe."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from kernel_dispatch import devices, settings
from kernel_dispatch.backends import preparing
from kernel_dispatch.backends.base import BaseBackend, LevelLike
from kernel_dispatch.backends.device_info import DeviceInfo
from kernel_dispatch.backends.levels import OptimizationLevel
from kernel_dispatch.backends.moving import each_tensor
from kernel_dispatch.backends.sampling import without_trace
from kernel_dispatch.config.dispatch import DispatchConfig
from lowering import targets
from lowering.contract import Probe, Target
from lowering.errors import BackendNotAvailableError, SettingError

_by_factory = contextvars.ContextVar("kernel_dispatch_by_factory", default=False)


@contextlib.contextmanager
def by_factory() -> Iterator[None]:
    """Classes are called by the factory here, and so without the hint to use it."""
    token = _by_factory.set(True)
    try:
        yield
    finally:
        _by_factory.reset(token)


class TargetBackend(BaseBackend):
    """What the vendors share. A subclass names its target and says what is different there."""

    TARGET: ClassVar[str]

    def __init__(self, config: DispatchConfig | None = None) -> None:
        if not _by_factory.get():
            warnings.warn(
                f"{type(self).__name__}(...) is the old way, and gives a backend even where its "
                f"device is absent: use get_backend({self.BACKEND_NAME!r}, config=...).",
                DeprecationWarning,
                stacklevel=2,
            )
        super().__init__(config)

    # --- the device ---

    def _setup_environment(self) -> None:
        """Which device the configuration names; it must be one of this vendor's."""
        wish = settings.resolve(None, self.config.as_options()).device
        if self.config.device is not None and wish is not None and wish.target != self.TARGET:
            raise SettingError(
                f"device={self.config.device!r} (from DispatchConfig) is no device of the backend "
                f"{self.BACKEND_NAME!r}."
            )
        if wish is not None and wish.target == self.TARGET and wish.index is not None:
            self._device_id = wish.index

    def _check_availability(self) -> bool:
        return self._probe().available

    def _probe(self) -> Probe:
        """What the target's probe says, unless a configuration file has switched the target off."""
        file = settings.resolve(None, self.config.as_options()).config
        if file is not None and (off := file.target_off(self.TARGET)):
            return Probe.no(off)
        return devices.probe(self._target())

    def _target(self) -> Target:
        target = targets.find(self.TARGET)
        assert target is not None, f"{type(self).__name__} is of an unknown target"
        return target

    def _demand(self) -> None:
        """The one error for a device that was named and cannot be used."""
        found = self._probe()
        if not found.available:
            raise BackendNotAvailableError(
                f"the backend {self.BACKEND_NAME!r} was asked for and is not here: "
                f"{found.reason.rstrip('.')}. Available: {', '.join(_here())}."
                + (f" To get it: {found.fix}" if found.fix else "")
            )
        if self._device_id >= self.device_count:
            raise BackendNotAvailableError(
                f"device {self._device_id} of the backend {self.BACKEND_NAME!r} was asked for; it "
                f"has {self.device_count}, numbered from 0. Available: {', '.join(_here())}."
            )

    @property
    def device_count(self) -> int:
        found = self._probe()
        return int(found.details.get("device_count", 1)) if found.available else 0

    @property
    def device(self) -> torch.device:
        return torch.device(self._device_type(), self._device_id)

    def _device_type(self) -> str:
        return self._target().device_types[0]

    @property
    def _home(self) -> torch.device:
        """Where models of this backend have their parameters and want their inputs."""
        return self.device

    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        found = self._probe()
        known = _record(found, device_id)
        why = {} if found.available else {"reason": found.reason, "fix": found.fix}
        return DeviceInfo(
            backend=self.BACKEND_NAME,
            device_type=str(self._named(device_id)),
            device_id=device_id,
            device_name=str(known.get("name", "")),
            compute_capability=self._compute_capability(known),
            total_memory_bytes=int(known.get("memory_bytes", 0)),
            driver_version=self._driver_version(found, known),
            is_available=found.available,
            properties={**self._properties(found, known), **why},
        )

    def _named(self, device_id: int) -> torch.device:
        return torch.device(self._device_type(), device_id)

    def _compute_capability(self, known: Mapping[str, Any]) -> str | None:
        return None

    def _driver_version(self, found: Probe, known: Mapping[str, Any]) -> str | None:
        return found.version or None

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        """What only this vendor has."""
        return {"features": sorted(found.details.get("features", ()))} if found.available else {}

    def to_device(self, value: Any) -> Any:
        self._demand()
        if isinstance(value, nn.Module):
            return value.to(self._home)
        return each_tensor(value, lambda tensor: tensor.to(self._home))

    def synchronize(self) -> None:
        self._demand()
        super().synchronize()

    def empty_cache(self) -> None:
        self._demand()
        super().empty_cache()

    def __enter__(self) -> TargetBackend:
        self._demand()
        return self

    # --- models ---

    def prepare_model(self, model: nn.Module, optimization_level: LevelLike = None) -> nn.Module:
        """`model` on the device, compiled at a level: None is the configuration's, else O2.

        The result is of the same class and shares parameters, buffers, submodules and hooks with
        `model`, which stays uncompiled. Parameters move in place: an optimizer stays valid.
        """
        module = self._placed(preparing.plain(model))
        return preparing.prepare(module, self._options(optimization_level))

    def optimize_for_inference(
        self, model: nn.Module, sample_input: Any = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """`model` in evaluation mode and without gradients, at the level at which it was prepared.

        With a `dtype` the model is copied, so that the caller's weights keep theirs, and inputs
        are cast at each call. With a `sample_input` (a tensor, a tuple, or a dict of keyword
        arguments) it compiles now, else at its first call; the sample leaves no trace in buffers
        and random state.
        """
        module = self._placed(preparing.plain(model)).eval()
        if dtype is not None:
            module = _as_dtype(module, dtype)
        around = preparing.without_gradients(dtype)
        optimized = preparing.prepare(module, self._options_of(model), around)
        if sample_input is not None:
            with without_trace(optimized, self.device):
                self.call(optimized, sample_input)
        return optimized

    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """`model` in training mode, at the level at which it was prepared; with the optimizer, if
        one is given.

        With a `dtype` the forward runs under autocast: weights and gradients stay as they are.
        """
        around = None if dtype is None else self._autocast(dtype)
        module = self._placed(preparing.plain(model)).train()
        known = preparing.how(model)
        if known is None or not known.as_written or around is not None:
            module = preparing.prepare(module, self._options_of(model), around)
        if optimizer is None:
            return module
        _check_optimizer(optimizer, module)
        return module, optimizer

    def call(self, model: nn.Module, sample_input: Any) -> Any:
        """Call a model with a sample: a tensor, a tuple of arguments, a dict of keyword ones."""
        sample = self.to_device(sample_input)
        if isinstance(sample, Mapping):
            return model(**sample)
        return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)

    def _placed(self, module: nn.Module) -> nn.Module:
        self._demand()
        return module.to(self._home)

    def _options_of(self, model: nn.Module) -> Mapping[str, Any]:
        known = preparing.how(model)
        return self._options(None) if known is None else known.options

    def _options(self, level: LevelLike) -> dict[str, Any]:
        """Options for torch.compile: the configuration's, and the level where one was given."""
        options = self.config.as_options()
        options.pop("device", None)  # it has said on which device the model is
        if level is not None:
            options["level"] = str(OptimizationLevel.from_string(level))
        wish = settings.resolve(None, options).device
        if wish is not None and str(wish) != self.TARGET:
            # The environment forces another device, or one by its number, which would move
            # tensors; what was asked for by name, and was put on its device, stays there.
            options["device"] = self.TARGET
        return options

    def _autocast(self, dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            return None
        if dtype not in (torch.bfloat16, torch.float16):
            raise SettingError(
                f"dtype={dtype} for training: give torch.bfloat16 or torch.float16 (autocast), or "
                f"torch.float32 (no autocast)."
            )
        return preparing.within(lambda: torch.autocast(self._home.type, dtype=dtype))


def _here() -> list[str]:
    from kernel_dispatch.backends.factory import list_available_backends

    return list_available_backends()


def _record(found: Probe, device_id: int) -> Mapping[str, Any]:
    """The probe's record of one device; empty where it has none."""
    records = found.details.get("devices", ())
    return records[device_id] if device_id < len(records) else {}


def _as_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SettingError(f"dtype={dtype}: give a floating-point dtype, such as torch.bfloat16.")
    held = [*module.parameters(), *module.buffers()]
    if all(one.dtype == dtype for one in held if one.is_floating_point()):
        return module
    return copy.deepcopy(module).to(dtype)


def _check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """It must hold this model's parameters; its state follows them to their device."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"optimizer={optimizer!r}: give a torch.optim.Optimizer.")
    mine = {id(parameter) for parameter in module.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in mine for parameter in held):
        raise SettingError(
            "the optimizer holds none of the model's parameters: a step would train nothing. Make "
            "it from model.parameters() of this model."
        )
    if any(_left_behind(optimizer.state.get(parameter), parameter) for parameter in held):
        optimizer.load_state_dict(optimizer.state_dict())  # puts state beside its parameter


def _left_behind(state: Mapping[str, Any] | None, parameter: torch.Tensor) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
        for value in (state or {}).values()
    )
