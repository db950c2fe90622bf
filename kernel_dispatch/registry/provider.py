"""One of the fourteen at work: a thin layer over `torch.compile(backend="unified")`, the probes and
the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernel_dispatch import devices
from kernel_dispatch.config.backend_file import BackendFile
from kernel_dispatch.registry import availability, compiling, data_types, flags, measures
from kernel_dispatch.registry.interface import BackendInterface, CompileContext
from kernel_dispatch.registry.memory import Blocks
from kernel_dispatch.registry.provider_id import ProviderId
from kernel_dispatch.registry.table import BackendInfo
from kernel_dispatch.settings import resolve
from lowering import targets
from lowering.contract import Probe, Target
from lowering.errors import BackendNotAvailableError


class Provider(BackendInterface):
    """A row of the table, asked and used. It holds no state but the memory that it allocated."""

    def __init__(self, info: BackendInfo) -> None:
        self.info = info
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<provider {self.info.name}: {self.reason or 'available'}>"

    # --- what it is -------------------------------------------------------------------------------

    def get_type(self) -> ProviderId:
        return self.info.type

    def get_name(self) -> str:
        return self.info.name

    def is_available(self) -> bool:
        return not self.reason

    @property
    def enabled(self) -> bool:
        """Does the configuration file leave it on? Without such a file, all are."""
        config = _config()
        return config is None or config.enables(self.info.name)

    @property
    def reason(self) -> str:
        """Why it cannot be used here; empty if it can."""
        return availability.reason(self.info, devices.this_machine(), _config())

    @property
    def probe(self) -> Probe:
        """What the library, or else the target, says of itself."""
        found = [devices.probe_provider(name) for name in self.info.providers]
        found = found or [devices.probe(self.target)]
        return next((one for one in found if one.available), found[0])

    @property
    def target(self) -> Target:
        """Where it computes here; where nothing of it is here, the first of its targets."""
        here = availability.target_of(self.info, devices.this_machine(), _config())
        record = here or targets.find(self.info.targets[0])
        assert record is not None, "the table names targets of ours"
        return record

    def _demand(self) -> None:
        if why := self.reason:
            raise BackendNotAvailableError(
                f"provider {self.info.name!r} cannot be used here: {why}."
            )

    # --- compilation ------------------------------------------------------------------------------

    def compile(self, ctx: CompileContext) -> bool:
        """Compile and run once; what was computed by whom is in `ctx.report` and `ctx.taken`."""
        return compiling.compile(self, ctx)

    def get_compile_flags(self) -> str:
        return flags.of(self.info, self.target)

    # --- memory and time --------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        details = devices.probe(self.target).details
        kind = details.get("tensors") or details.get("device") or self.target.device_types[0]
        return torch.device(str(kind))

    def allocate_memory(self, size: int) -> int:
        self._demand()
        return self._blocks.allocate(size, self.device, self.get_max_memory())

    def free_memory(self, ptr: int) -> None:
        self._blocks.free(ptr)

    def memory_view(self, ptr: int) -> torch.Tensor:
        """Memory that was allocated, as a tensor of bytes."""
        return self._blocks.view(ptr)

    @property
    def allocated_bytes(self) -> int:
        """What `allocate_memory` has given and `free_memory` not taken back."""
        return self._blocks.total

    def synchronize(self) -> None:
        self._demand()
        torch.get_device_module(self.device).synchronize()

    # --- what it can do ---------------------------------------------------------------------------

    def get_max_memory(self) -> int:
        return measures.max_memory(self.target.name, devices.probe(self.target))

    def get_max_shared_memory(self) -> int:
        return measures.max_shared_memory(self.target.name)

    def supports_data_type(self, dt: torch.dtype | str) -> bool:
        name = data_types.name_of(dt)
        return data_types.supports(self.info, self.target, self._features(), name)

    def _features(self) -> frozenset[str]:
        return frozenset(devices.probe(self.target).details.get("features", ()))

    def as_dict(self) -> dict[str, Any]:
        """Everything that is known of it, as `get_backend_info` gives it."""
        info, target, reason = self.info, self.target, self.reason
        found = devices.probe(target)
        described: dict[str, Any] = {
            "name": info.name,
            "display_name": info.display_name,
            "type": info.type,
            "summary": info.summary,
            "available": not reason,
            "enabled": self.enabled,
            "reason": reason,
            "version": self.probe.version,
            "requires_gpu": info.requires_gpu,
            "required_libs": list(info.required_libs),
            "optional_libs": list(info.optional_libs),
            "target": target.name,
            "compute_capability": measures.compute_capability(target.name, found),
            "compute_units": measures.compute_units(target.name, found),
            "max_memory": self.get_max_memory(),
            "max_shared_memory": self.get_max_shared_memory(),
            "device_count": measures.device_count(target.name, found),
            "devices": [dict(one) for one in _described(found)],
            "dtypes": list(data_types.supported(info, target, self._features())),
        }
        if target.name == "cpu":
            described["isa"] = sorted(found.details.get("features", ()))
        return described


def _described(found: Probe) -> Sequence[Mapping[str, Any]]:
    return [one for one in found.details.get("devices", ()) if isinstance(one, Mapping)]


def _config() -> BackendFile | None:
    return resolve().config
