"""Which provider it is to be: the one that was named, else the first fallback that is here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kernel_dispatch.registry import table
from kernel_dispatch.registry.provider import Provider
from kernel_dispatch.registry.registry import BackendRegistry
from lowering.errors import BackendNotAvailableError, unknown

log = logging.getLogger(__name__)


def select_backend(
    backend: str | None = None, fallback_backends: Sequence[str] | None = None
) -> str:
    """Its name. Without `backend`, the default one; none that is here is an error with the reasons.

    The first words of the errors are those of the seed documents.
    """
    from kernel_dispatch.registry.functions import get_available_backends, get_default_backend

    others = (
        [] if fallback_backends is None else table.names_of(fallback_backends, "fallback_backends")
    )
    if backend is None:
        backend = get_default_backend()
    wished = [backend, *others]
    for name in wished:
        if BackendRegistry.instance().is_backend_available(name):
            _tell_of_unknown(wished[: wished.index(name)])
            return table.demand(name).name
    head = (
        f"No available backend from {wished}"
        if others
        else f"Backend '{backend}' not available. Available: {get_available_backends()}"
    )
    raise BackendNotAvailableError(f"{head}. {' '.join(why_not(name) for name in wished)}")


def why_not(name: str) -> str:
    """One sentence."""
    info = table.find(name)
    if info is None:
        return str(unknown("provider", name, table.BY_NAME))
    found = BackendRegistry.instance().get_backend(info.type)
    if found is None:
        return f"{info.name} is not registered."
    reason = found.reason if isinstance(found, Provider) else "its probe says no"
    return f"{info.name}: {reason}."


def _tell_of_unknown(passed_over: Iterable[str]) -> None:
    """A typo must not look like a provider that is absent."""
    for name in passed_over:
        if table.find(name) is None:
            log.warning("%s", why_not(name))
