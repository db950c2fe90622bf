"""The fourteen providers by number and name: what each is, whether it is here, and how to use it.

Advanced: `torch.compile(model, backend="unified")` needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_dispatch.registry.functions import (
        get_available_backends,
        get_backend_info,
        get_default_backend,
        is_backend_available,
        list_backends,
        set_default_backend,
    )
    from kernel_dispatch.registry.interface import BackendInterface, CompileContext
    from kernel_dispatch.registry.provider import Provider
    from kernel_dispatch.registry.provider_id import ProviderId
    from kernel_dispatch.registry.registry import BackendRegistry
    from kernel_dispatch.registry.selecting import select_backend
    from kernel_dispatch.registry.table import BackendInfo

# public name -> the file where it lives; loaded when first used: `settings` reads the table alone.
_PUBLIC = {
    "BackendInfo": "table",
    "BackendInterface": "interface",
    "BackendRegistry": "registry",
    "CompileContext": "interface",
    "Provider": "provider",
    "ProviderId": "provider_id",
    "get_available_backends": "functions",
    "get_backend_info": "functions",
    "get_default_backend": "functions",
    "is_backend_available": "functions",
    "list_backends": "functions",
    "select_backend": "selecting",
    "set_default_backend": "functions",
}

__all__ = [
    "BackendInfo",
    "BackendInterface",
    "BackendRegistry",
    "CompileContext",
    "Provider",
    "ProviderId",
    "get_available_backends",
    "get_backend_info",
    "get_default_backend",
    "is_backend_available",
    "list_backends",
    "select_backend",
    "set_default_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kernel_dispatch.registry' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
