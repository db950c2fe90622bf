"""The providers by number and by name. One lock, held for a look-up only: probes run outside it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kernel_dispatch.registry import table
from kernel_dispatch.registry.interface import BackendInterface
from kernel_dispatch.registry.provider import Provider
from kernel_dispatch.registry.provider_id import ProviderId
from lowering.errors import SettingError, unknown


class BackendRegistry:
    """All providers that can be asked for. `instance()` is the process's own."""

    _instance: BackendRegistry | None = None
    _lock_of_class = threading.RLock()

    def __init__(self, backends: Iterable[BackendInterface] | None = None) -> None:
        """Without `backends`, the fourteen."""
        self._lock = threading.RLock()
        self._backends: dict[ProviderId, BackendInterface] = {}
        given = map(Provider, table.TABLE) if backends is None else backends
        for backend in given:
            self.register_backend(backend)

    @classmethod
    def instance(cls) -> BackendRegistry:
        with cls._lock_of_class:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @classmethod
    def get_instance(cls) -> BackendRegistry:
        """The other document's name for `instance()`."""
        return cls.instance()

    def register_backend(self, backend: BackendInterface, override: bool = False) -> bool:
        """False if its number is taken and `override` does not allow to take its place."""
        if not isinstance(backend, BackendInterface):
            raise TypeError(f"register_backend() takes a BackendInterface, not {backend!r}")
        kind = backend.get_type()
        if table.find(kind) is None:
            names = ", ".join(table.BY_NAME)
            raise SettingError(
                f"a backend of type {kind!r} cannot be registered: give one of the fourteen, "
                f"{names}. New hardware is a target of its own: docs/add_a_target.md."
            )
        with self._lock:
            if kind in self._backends and not override:
                return False
            self._backends[kind] = backend
            return True

    def unregister_backend(self, key: ProviderId | str) -> bool:
        """False if there was none."""
        kind = self._type_of(key)
        with self._lock:
            return kind is not None and self._backends.pop(kind, None) is not None

    def get_backend(self, key: ProviderId | str) -> BackendInterface | None:
        """By number, name or alias, in any case; None if there is none."""
        kind = self._type_of(key)
        with self._lock:
            return self._backends.get(kind) if kind is not None else None

    def get_available_backends(self) -> list[ProviderId]:
        """Enabled, and their probes say yes; in the order of the table."""
        with self._lock:
            known = dict(self._backends)
        ordered = (info.type for info in table.TABLE if info.type in known)
        return [kind for kind in ordered if known[kind].is_available()]

    def is_backend_available(self, key: ProviderId | str) -> bool:
        found = self.get_backend(key)
        return found is not None and found.is_available()

    def get_default_backend(self) -> BackendInterface:
        """The object behind `kernel_dispatch.get_default_backend()`."""
        from kernel_dispatch.registry.functions import get_default_backend

        found = self.get_backend(name := get_default_backend())
        if found is None:
            raise unknown("provider", name, self.names(), "this registry")
        return found

    def names(self) -> list[str]:
        """All that are registered, available or not."""
        with self._lock:
            return [info.name for info in table.TABLE if info.type in self._backends]

    @staticmethod
    def _type_of(key: object) -> ProviderId | None:
        info = table.find(key)
        return info.type if info is not None else None
