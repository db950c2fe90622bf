"""kernel_dispatch: `torch.compile(model, backend="unified")`, and what it did.

Importing this package starts no device, loads no vendor library and changes no global setting.
The backend itself is registered by an entry point; nothing has to be imported to use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_dispatch import own_packages
from kernel_dispatch._version import __version__

own_packages.demand()

if TYPE_CHECKING:
    from kernel_dispatch.backend import register, reset, unified
    from kernel_dispatch.backends import (
        BackendFactory,
        BackendType,
        DeviceInfo,
        OptimizationLevel,
        OptimizationResult,
        OptimizationStrategy,
        detect_best_backend,
        get_backend,
        get_optimizer,
        list_available_backends,
    )
    from kernel_dispatch.config import DispatchConfig
    from kernel_dispatch.devices import available_targets
    from kernel_dispatch.dry_running import dry_run
    from kernel_dispatch.explaining import Explanation, explain
    from kernel_dispatch.facts import GraphFacts
    from kernel_dispatch.planned_graphs import DryRun
    from kernel_dispatch.registry import (
        BackendInfo,
        BackendRegistry,
        ProviderId,
        get_available_backends,
        get_backend_info,
        get_default_backend,
        is_backend_available,
        list_backends,
        set_default_backend,
    )
    from kernel_dispatch.reporting import Fallback, GraphReport, Report, report
    from kernel_dispatch.selection import Plan
    from kernel_dispatch.settings import Settings, configure, list_levels, list_options
    from kernel_dispatch.superoptimizing import superoptimize
    from lowering.device import Device, DeviceType
    from lowering.errors import (
        BackendNotAvailableError,
        RegistrationError,
        SettingError,
        StrictModeError,
        UnifiedError,
        UnifiedWarning,
    )
    from lowering.levels import Level
    from lowering.reasons import Reason

# public name -> where it lives; loaded when first used, so that the import stays light.
_PUBLIC = {
    "unified": "kernel_dispatch.backend",
    "reset": "kernel_dispatch.backend",
    "register": "kernel_dispatch.backend",
    "available_targets": "kernel_dispatch.devices",
    "dry_run": "kernel_dispatch.dry_running",
    "DryRun": "kernel_dispatch.planned_graphs",
    "explain": "kernel_dispatch.explaining",
    "Explanation": "kernel_dispatch.explaining",
    "GraphFacts": "kernel_dispatch.facts",
    "report": "kernel_dispatch.reporting",
    "Report": "kernel_dispatch.reporting",
    "GraphReport": "kernel_dispatch.reporting",
    "Fallback": "kernel_dispatch.reporting",
    "Plan": "kernel_dispatch.selection",
    "Settings": "kernel_dispatch.settings",
    "configure": "kernel_dispatch.settings",
    "list_levels": "kernel_dispatch.settings",
    "list_options": "kernel_dispatch.settings",
    "Level": "lowering.levels",
    "Reason": "lowering.reasons",
    "BackendFactory": "kernel_dispatch.backends",
    "BackendType": "kernel_dispatch.backends",
    "DeviceInfo": "kernel_dispatch.backends",
    "OptimizationLevel": "kernel_dispatch.backends",
    "OptimizationResult": "kernel_dispatch.backends",
    "OptimizationStrategy": "kernel_dispatch.backends",
    "detect_best_backend": "kernel_dispatch.backends",
    "get_backend": "kernel_dispatch.backends",
    "get_optimizer": "kernel_dispatch.backends",
    "list_available_backends": "kernel_dispatch.backends",
    "DispatchConfig": "kernel_dispatch.config",
    "BackendInfo": "kernel_dispatch.registry",
    "BackendRegistry": "kernel_dispatch.registry",
    "ProviderId": "kernel_dispatch.registry",
    "get_available_backends": "kernel_dispatch.registry",
    "get_backend_info": "kernel_dispatch.registry",
    "get_default_backend": "kernel_dispatch.registry",
    "is_backend_available": "kernel_dispatch.registry",
    "list_backends": "kernel_dispatch.registry",
    "set_default_backend": "kernel_dispatch.registry",
    "superoptimize": "kernel_dispatch.superoptimizing",
    "Device": "lowering.device",
    "DeviceType": "lowering.device",
    "UnifiedError": "lowering.errors",
    "SettingError": "lowering.errors",
    "BackendNotAvailableError": "lowering.errors",
    "StrictModeError": "lowering.errors",
    "RegistrationError": "lowering.errors",
    "UnifiedWarning": "lowering.errors",
}

__all__ = [
    "BackendFactory",
    "BackendInfo",
    "BackendNotAvailableError",
    "BackendRegistry",
    "BackendType",
    "Device",
    "DeviceInfo",
    "DeviceType",
    "DispatchConfig",
    "DryRun",
    "Explanation",
    "Fallback",
    "GraphFacts",
    "GraphReport",
    "Level",
    "OptimizationLevel",
    "OptimizationResult",
    "OptimizationStrategy",
    "Plan",
    "ProviderId",
    "Reason",
    "RegistrationError",
    "Report",
    "SettingError",
    "Settings",
    "StrictModeError",
    "UnifiedError",
    "UnifiedWarning",
    "__version__",
    "available_targets",
    "configure",
    "detect_best_backend",
    "dry_run",
    "explain",
    "get_available_backends",
    "get_backend",
    "get_backend_info",
    "get_default_backend",
    "get_optimizer",
    "is_backend_available",
    "list_available_backends",
    "list_backends",
    "list_levels",
    "list_options",
    "register",
    "report",
    "reset",
    "set_default_backend",
    "superoptimize",
    "unified",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kernel_dispatch' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
