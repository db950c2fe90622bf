"""The fourteen providers by name: which are here, what they are, and which is the default."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from kernel_dispatch import default_backend
from kernel_dispatch.options import OPTIONS, DeviceWish
from kernel_dispatch.registry import table
from kernel_dispatch.registry.provider import Provider
from kernel_dispatch.registry.registry import BackendRegistry
from kernel_dispatch.registry.selecting import why_not
from kernel_dispatch.settings import resolve
from lowering.errors import BackendNotAvailableError, UnifiedWarning, unknown

log = logging.getLogger(__name__)


def get_available_backends() -> list[str]:
    """Names of the providers that are enabled and whose probes say yes, in the table's order."""
    found = BackendRegistry.instance().get_available_backends()
    return [table.BY_ID[kind].name for kind in found]


def is_backend_available(backend: str) -> bool:
    """False for a name that there is not, too; that is logged, with the nearest name."""
    if table.find(backend) is None:
        log.warning("%s", unknown("provider", backend, table.BY_NAME))
        return False
    return BackendRegistry.instance().is_backend_available(backend)


def get_backend_info(backend: str) -> dict[str, Any]:
    """Everything that is known of one provider, available or not; docs/providers.md lists the keys.

    A name that there is not is a `SettingError`, which is a ValueError.
    """
    info = table.demand(backend)
    found = BackendRegistry.instance().get_backend(info.type)
    if found is None:
        raise unknown("provider", backend, BackendRegistry.instance().names(), "the registry")
    described = (found if isinstance(found, Provider) else Provider(info)).as_dict()
    if not isinstance(found, Provider):  # somebody's own, in its place: his word counts
        described |= {
            "available": found.is_available(),
            "max_memory": found.get_max_memory(),
            "max_shared_memory": found.get_max_shared_memory(),
            "reason": "" if found.is_available() else "its probe says no",
        }
    return described


def get_default_backend() -> str:
    """configure(provider=), else a forced device, else what was set, else cuda where it is here,
    else the first that is. What was set also holds where it computes on the forced device."""
    settings = resolve()
    wish, chosen = settings.device, settings.provider
    here = chosen is not None and (wish is None or wish.target in table.BY_NAME[chosen].targets)
    if chosen is not None and (here or dict(settings.sources)["provider"] == "configure()"):
        return chosen
    if wish is not None:
        return _forced(wish)
    available = get_available_backends()  # cuda comes first in the table
    if not available:
        whys = " ".join(map(why_not, table.BY_NAME))
        raise BackendNotAvailableError(f"No provider can be used here. {whys}")
    return available[0]


def _forced(wish: DeviceWish) -> str:
    """Some targets have no provider of their own name (rocm): the first that computes there."""
    name = next((n for n, target in table.OWN_TARGET.items() if target == wish.target), None)
    names = [name] if name else [i.name for i in table.TABLE if wish.target in i.targets]
    for one in names:
        if BackendRegistry.instance().is_backend_available(one):
            return one
    if not names:
        raise BackendNotAvailableError(
            f"device {str(wish)!r} is forced, and none of the fourteen providers computes there; "
            f"kernel_dispatch.get_backend() knows it."
        )
    raise BackendNotAvailableError(
        f"device {str(wish)!r} is forced and cannot be used here. {' '.join(map(why_not, names))} "
        f"Available: {', '.join(get_available_backends())}."
    )


def set_default_backend(backend: str | None) -> None:
    """The provider of what is compiled from now on, here and wherever nobody chose; None resets.

    On its targets, others that compute regions are off. Graphs follow their tensors as before, and
    graphs that are compiled keep what they have.
    """
    if backend is None:
        default_backend.choose(None)
        return
    info = table.demand(backend, "set_default_backend()")
    if not BackendRegistry.instance().is_backend_available(info.type):
        here = ", ".join(get_available_backends())
        raise BackendNotAvailableError(
            f"provider {info.name!r} cannot be the default. {why_not(info.name)} Available: {here}."
        )
    default_backend.choose(info.name)
    _warn_if_overruled(info)


def _warn_if_overruled(info: table.BackendInfo) -> None:
    """The environment comes first, and that must not go unsaid."""
    name = next(option.env for option in OPTIONS if option.name == "device")
    wish = resolve(environ={name or "": os.environ.get(name or "", "")}).device
    if wish is not None and wish.target not in info.targets:
        warnings.warn(
            f"set_default_backend({info.name!r}) has no effect while {name}={wish} is set: "
            f"{info.name} computes on {', '.join(info.targets)}.",
            UnifiedWarning,
            stacklevel=3,
        )


def list_backends(verbose: bool = False) -> None:
    """Print a table of the fourteen; `verbose` adds devices, limits, and why others are absent."""
    default = _default_if_any()
    wide = max(map(len, table.BY_NAME))
    for name in table.BY_NAME:
        described = get_backend_info(name)
        state = "available" if described["available"] else "absent"
        mark = "*" if name == default else " "
        print(f"{mark} {name:<{wide}}  {state:<9}  {described['display_name']}")
        if verbose:
            for line in _details(described):
                print(f"  {'':<{wide}}  {line}")


def _default_if_any() -> str:
    try:
        return get_default_backend()
    except BackendNotAvailableError:
        return ""


def _details(described: dict[str, Any]) -> Iterator[str]:
    yield described["summary"]
    if not described["available"]:
        yield f"why not: {described['reason']}"
        libraries = ", ".join(described["required_libs"])
        if libraries:
            yield f"needs: {libraries}"
        return
    version = f", {described['version']}" if described["version"] else ""
    yield f"on {described['target']}{version}"
    yield (
        f"{described['compute_units']} compute units, {described['max_memory'] >> 20} MiB of "
        f"memory, {described['max_shared_memory'] >> 10} KiB shared or cached"
    )
    yield "computes in " + ", ".join(described["dtypes"])
    yield from (f"device: {device}" for device in described["devices"])
