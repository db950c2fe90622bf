"""Which backend: by name, or the best one that is here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernel_dispatch import settings
from kernel_dispatch.backends.amd import AMDBackend, AMDOptimizer
from kernel_dispatch.backends.backend_type import BackendType, accepted, without_class
from kernel_dispatch.backends.base import BaseBackend
from kernel_dispatch.backends.base_optimizer import BaseOptimizer
from kernel_dispatch.backends.cpu import CPUBackend, CPUOptimizer
from kernel_dispatch.backends.intel import IntelBackend, IntelOptimizer
from kernel_dispatch.backends.mps import MPSBackend, MPSOptimizer
from kernel_dispatch.backends.nvidia import NVIDIABackend, NVIDIAOptimizer
from kernel_dispatch.backends.target_backend import by_factory
from kernel_dispatch.backends.tpu import TPUBackend, TPUOptimizer
from kernel_dispatch.config.dispatch import DispatchConfig
from kernel_dispatch.registry import table
from lowering.errors import (
    BackendNotAvailableError,
    RegistrationError,
    SettingError,
    UnifiedError,
    unknown,
)

log = logging.getLogger(__name__)


class Vendor(NamedTuple):
    """A vendor's two classes."""

    backend: type[BaseBackend]
    optimizer: type[BaseOptimizer] | None


# In the order in which AUTO asks them.
_OURS: dict[str, Vendor] = {
    "nvidia": Vendor(NVIDIABackend, NVIDIAOptimizer),
    "amd": Vendor(AMDBackend, AMDOptimizer),
    "tpu": Vendor(TPUBackend, TPUOptimizer),
    "intel": Vendor(IntelBackend, IntelOptimizer),
    "mps": Vendor(MPSBackend, MPSOptimizer),
    "cpu": Vendor(CPUBackend, CPUOptimizer),
}
_registered: dict[str, Vendor] = {}
_lock = threading.Lock()


class BackendFactory:
    """Makes backends and optimizers, and says which there are."""

    @classmethod
    def create(
        cls,
        backend_type: BackendType | str | None = BackendType.AUTO,
        config: DispatchConfig | None = None,
    ) -> BaseBackend:
        """The backend of a vendor; one that is named and not here is a BackendNotAvailableError."""
        name = _name(backend_type)
        if name == BackendType.AUTO:
            return _best(config)
        backend = _made(_vendor(name).backend, config)
        _demand(backend)
        return backend

    @classmethod
    def create_optimizer(
        cls,
        backend_type: BackendType | str | None = BackendType.AUTO,
        config: DispatchConfig | None = None,
    ) -> BaseOptimizer:
        """The optimizer of a vendor. It can be asked for its strategies wherever it is; to
        optimize, its device has to be here."""
        name = _name(backend_type)
        if name == BackendType.AUTO:
            name = _best(config).BACKEND_NAME
        optimizer = _vendor(name).optimizer
        if optimizer is None:
            raise SettingError(f"the backend {name!r} was registered without an optimizer.")
        return optimizer(config)  # type: ignore[call-arg]

    @classmethod
    def is_available(cls, backend_type: BackendType | str) -> bool:
        """Can it be created here?"""
        name = _name(backend_type)
        return name == BackendType.AUTO or not _absence(_vendor(name))

    @classmethod
    def get_all_backend_info(cls) -> dict[str, dict[str, Any]]:
        """name -> available, class, and why it is not here. A broken probe stops nobody else."""
        return {name: _told(vendor) for name, vendor in _all().items()}

    @classmethod
    def register_backend(
        cls,
        name: str,
        backend: type[BaseBackend],
        optimizer: type[BaseOptimizer] | None = None,
        *,
        override: bool = False,
    ) -> None:
        """Add a backend of your own, to be created by its name; AUTO never chooses it."""
        word = str(name).strip().lower()
        if not word.isidentifier() or word in _OURS or word == BackendType.AUTO:
            raise RegistrationError(f"a backend cannot be registered under the name {name!r}")
        for wanted, given in ((BaseBackend, backend), (BaseOptimizer, optimizer)):
            if given is not None:
                _check_class(wanted, given)
        with _lock:
            if word in _registered and not override:
                raise RegistrationError(f"{word!r} is registered; override=True replaces it")
            _registered[word] = Vendor(backend, optimizer)


def get_backend(
    name: BackendType | str | None = BackendType.AUTO, config: DispatchConfig | None = None
) -> BaseBackend:
    """The backend of that vendor, or the best one that is here."""
    return BackendFactory.create(name, config)


def get_optimizer(
    name: BackendType | str | None = None, config: DispatchConfig | None = None
) -> BaseOptimizer:
    """The optimizer of that vendor, or of the best one that is here."""
    return BackendFactory.create_optimizer(name, config)


def detect_best_backend() -> BackendType:
    """What `get_backend()` would give; it is equal to its name."""
    return BackendType(_best(None).BACKEND_NAME)


def list_available_backends() -> list[str]:
    """Names of the backends that can be created here, in alphabetical order."""
    return sorted(name for name, vendor in _all().items() if not _absence(vendor))


# --- names ----------------------------------------------------------------------------------------


def _all() -> dict[str, Vendor]:
    with _lock:
        return {**_OURS, **_registered}


def _name(given: BackendType | str | None) -> str:
    if given is None:
        return BackendType.AUTO.value
    word = given.strip().lower() if isinstance(given, str) else given
    if isinstance(word, str) and word in _all():
        return str(word)
    try:
        return BackendType.from_string(given).value
    except SettingError:
        raise unknown("backend", given, [*accepted(), *_all()]) from None


def _vendor(name: str) -> Vendor:
    return _all()[name]


def _check_class(wanted: type, given: object) -> None:
    if not isinstance(given, type) or not issubclass(given, wanted):
        raise RegistrationError(f"{given!r} is no subclass of {wanted.__name__}")
    if lacking := sorted(getattr(given, "__abstractmethods__", ())):
        raise RegistrationError(f"{given.__name__} lacks {', '.join(lacking)}")


# --- what is here ---------------------------------------------------------------------------------


def _made(backend: type[BaseBackend], config: DispatchConfig | None = None) -> BaseBackend:
    with by_factory():
        return backend(config)


def _absence(vendor: Vendor) -> str:
    """Why it cannot be created here; empty if it can."""
    try:
        backend = _made(vendor.backend)
        if backend.is_available:
            return ""
        said = backend.get_device_info().properties.get("reason", "")
    except SettingError:  # the user's own mistake, such as a configuration file that is not there
        raise
    except Exception as error:  # noqa: BLE001  (third-party classes: one bad one stops nobody)
        return f"asking for it raised {type(error).__name__}: {error}"
    return str(said) or "it says that its device is not here"


def _told(vendor: Vendor) -> dict[str, Any]:
    why = _absence(vendor)
    return {
        "available": not why,
        "class": vendor.backend.__name__,
        "optimizer": vendor.optimizer.__name__ if vendor.optimizer else None,
        "reason": why,
        "device_count": 0 if why else _made(vendor.backend).device_count,
    }


def _demand(backend: BaseBackend) -> None:
    demand = getattr(backend, "_demand", None)
    why = ""
    try:
        if demand is not None:
            return demand()
        if backend.is_available:
            return None
    except UnifiedError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever a driver raises, it is not here)
        why = f": asking for it raised {type(error).__name__}: {error}"
    raise BackendNotAvailableError(
        f"the backend {backend.BACKEND_NAME!r} was asked for and is not here{why}. "
        f"Available: {', '.join(list_available_backends())}."
    )


# --- AUTO -----------------------------------------------------------------------------------------


def _best(config: DispatchConfig | None) -> BaseBackend:
    """What was forced; else what was chosen as the default; else the first in order."""
    wished = settings.resolve(None, config.as_options() if config else None)
    if wished.device is not None:
        source = dict(wished.sources)["device"]
        backend = _made(_of_target(wished.device.target, source).backend, config)
        _demand(backend)
        return backend
    for name in _in_order(wished):
        if (found := _preferred(_OURS[name], config)) is not None:
            return found
    whys = "; ".join(f"{name}: {_absence(_OURS[name])}" for name in _in_order(wished))
    raise BackendNotAvailableError(f"no backend can be used here: {whys}.")


def _preferred(vendor: Vendor, config: DispatchConfig | None) -> BaseBackend | None:
    """None also where asking for it fails: one broken driver stops nobody else."""
    try:
        backend = _made(vendor.backend, config)
        return backend if getattr(backend, "preferred", backend.is_available) else None
    except SettingError:
        raise
    except Exception:
        log.warning("%s was left out", vendor.backend.__name__, exc_info=True)
        return None


def _in_order(wished: settings.Settings) -> Iterator[str]:
    """All vendors; or those on whose devices the chosen provider computes."""
    if wished.provider is None:
        yield from _OURS
        return
    source = dict(wished.sources)["provider"]
    targets = table.demand(wished.provider).targets
    here = {BackendType.of_target(target) for target in targets} - {None}
    if not here:
        raise without_class(targets[0], f"{wished.provider}, {source}")
    yield from (name for name in _OURS if BackendType(name) in here)


def _of_target(target: str, source: str) -> Vendor:
    found = BackendType.of_target(target)
    if found is None:
        raise without_class(target, source)
    return _OURS[found.value]
