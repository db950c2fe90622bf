"""TPUs, and what else XLA's runtime computes on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernel_dispatch import devices
from kernel_dispatch.backends.base import LevelLike
from kernel_dispatch.backends.device_info import DeviceInfo
from kernel_dispatch.backends.target_backend import TargetBackend
from kernel_dispatch.backends.target_optimizer import TargetOptimizer
from lowering.contract import Probe


class TPUBackend(TargetBackend):
    """Models and inputs stay on the CPU: the compiled graph carries parameters over once, and what
    changes with each call. (XLA's tensors cannot take the place of a parameter's own, so moving
    a model there would cut it off from its optimizer.)"""

    BACKEND_NAME = "tpu"
    TARGET = "xla"

    def _probe(self) -> Probe:
        """That a package is installed is not enough: its runtime has to start."""
        found = super()._probe()
        if not found.available:
            return found
        started = devices.probe_provider(str(found.details.get("provider", "")))
        if not started.available:
            return Probe.no(started.reason, started.fix)
        more = {**found.details, **started.details}
        more["device"] = found.details.get("device", "xla")
        return Probe(True, "", found.version, "", more)

    @property
    def preferred(self) -> bool:
        """Only a TPU: XLA on the CPU is slower than the backend "cpu"."""
        found = self._probe()
        return found.available and found.details.get("pjrt", "TPU") == "TPU"

    def _device_type(self) -> str:
        return str(devices.probe(self._target()).details.get("device", "xla"))

    @property
    def _home(self) -> torch.device:
        return torch.device("cpu")

    def _options(self, level: LevelLike) -> dict[str, Any]:
        options = super()._options(level)
        index = f":{self._device_id}" if self._device_id else ""
        return {**options, "device": f"{self.TARGET}{index}"}

    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        info = super()._get_device_info(device_id)
        attributes = _attributes(self._probe()) if info.is_available else ()
        if device_id < len(attributes):
            info.device_name = str(attributes[device_id].get("name", ""))
        return info

    def _properties(self, found: Probe, known: Mapping[str, Any]) -> dict[str, Any]:
        if not found.available:
            return {}
        kind, attributes = found.details.get("pjrt", "TPU"), _attributes(found)
        return {
            "provider": found.details.get("provider", ""),
            "runtime": kind,  # what PJRT computes on: TPU, CPU, CUDA
            "version": _version() if kind == "TPU" else None,
            "topology": _topology(attributes),
        }

    def synchronize(self) -> None:
        self._demand()
        if self._device_type() == "tpu":
            torch.tpu.synchronize()  # type: ignore[attr-defined]
        else:
            importlib.import_module("torch_xla").sync(wait=True)

    def empty_cache(self) -> None:
        """XLA's runtime manages the device's memory itself and has no call to give it back."""
        self._demand()


def _attributes(found: Probe) -> Sequence[Mapping[str, Any]]:
    """What the runtime says of each device: its name, and on TPUs its coordinates."""
    if found.details.get("provider") != "torch_xla":
        return ()
    try:
        runtime: Any = importlib.import_module("torch_xla.runtime")
        return list(runtime.global_runtime_device_attributes())
    except Exception:  # noqa: BLE001  (a runtime that does not tell is told as None)
        return ()


def _topology(attributes: Sequence[Mapping[str, Any]]) -> str | None:
    """ "2x2x1": how far the coordinates of the devices reach."""
    places = [one["coords"] for one in attributes if one.get("coords")]
    return "x".join(str(max(axis) + 1) for axis in zip(*places, strict=True)) or None


def _version() -> str | None:
    """ "v4", "v5litepod" ..., as the machine's own metadata have it."""
    try:
        tpu: Any = importlib.import_module("torch_xla._internal.tpu")
        return str(tpu.get_tpu_type())
    except Exception:  # noqa: BLE001  (no metadata server, or another package)
        return None


class TPUOptimizer(TargetOptimizer):
    BACKEND = TPUBackend
