"""What the user asked for: the only reader of `options=`, `mode=`, `configure()` and UNIFIED_*.

Precedence, for each option on its own: option > context > environment > default. Every value
remembers its source, so that a report can say not only "O1" but "O1, from UNIFIED_LEVEL".
The provider's default is what `set_default_backend()` chose.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kernel_dispatch import default_backend
from kernel_dispatch.options import OPTIONS, DeviceWish, Option
from lowering.errors import SettingError, UnifiedWarning, nearest, unknown
from lowering.levels import Level

if TYPE_CHECKING:
    from kernel_dispatch.config.backend_file import BackendFile


_BY_NAME = {option.name: option for option in OPTIONS}
_KNOWN_ENV = {option.env for option in OPTIONS if option.env}

SET_DEFAULT = "set_default_backend()"  # as the source of a provider

# Inductor's mode strings, as users of torch.compile know them -> level.
MODES = {
    "default": Level.O2,
    "reduce-overhead": Level.O3,
    "max-autotune": Level.O3,
    "max-autotune-no-cudagraphs": Level.O3,
}


@dataclass(frozen=True)
class Settings:
    """The effective settings of one graph. Frozen, hashable and picklable."""

    level: Level = Level.O2
    device: DeviceWish | None = None
    strict: bool = False
    disable: frozenset[str] = frozenset()
    provider: str | None = None
    config: BackendFile | None = None
    threads: int | None = None
    keep_memory: int | None = None
    tolerance: float = 1e-2
    buckets: tuple[int, ...] | None = None
    cache_dir: str | None = None
    calibration: str = "auto"
    guards: str = "pinned"
    inductor: tuple[tuple[str, Any], ...] = field(default=(), hash=False)  # may hold lists
    mode: str | None = None
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache_dir) if self.cache_dir else default_cache_folder()

    @property
    def provider_by_default(self) -> bool:
        """Did set_default_backend() choose it? It has looked then whether it is here."""
        return dict(self.sources).get("provider") == SET_DEFAULT

    def against_context(self) -> str:
        """Where configure(), as it is in force now, asks for something else than these settings."""
        context, sources = _context.get(), dict(self.sources)
        return "; ".join(
            f"{name} is {getattr(self, name)} and configure() asks for {value}"
            for name, value in context.items()
            if sources.get(name) not in ("options=", "mode=") and getattr(self, name) != value
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """name -> {value, source}; values as JSON can carry them."""
        sources = dict(self.sources)
        shown: dict[str, Any] = {
            "level": str(self.level),
            "device": str(self.device) if self.device else "auto",
            "strict": self.strict,
            "disable": sorted(self.disable),
            "provider": self.provider or "auto",
            "config": self.config.as_dict() if self.config else None,
            "threads": self.threads,
            "keep_memory": "auto" if self.keep_memory is None else self.keep_memory,
            "tolerance": self.tolerance,
            "buckets": "off" if self.buckets is None else list(self.buckets) or "auto",
            "cache_dir": str(self.cache_folder),
            "calibration": self.calibration,
            "guards": self.guards,
            "inductor": {key: repr(value) for key, value in self.inductor},
        }
        rows = {name: {"value": v, "source": sources[name]} for name, v in shown.items()}
        if self.mode:
            rows["mode"] = {"value": self.mode, "source": "mode="}
        return rows


def default_cache_folder(
    environ: Mapping[str, str] | None = None, platform: str = sys.platform
) -> Path:
    """The user's own cache folder, as the platform has it."""
    environ = os.environ if environ is None else environ
    name = "kernel_dispatch"
    xdg = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification: a relative one is to be ignored
        return Path(xdg, name)
    if platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"], name, "Cache")
    try:
        home = Path.home()
    except RuntimeError:  # a user id without a home, as containers have
        return Path(tempfile.gettempdir(), f"{name}-{os.getuid() if hasattr(os, 'getuid') else 0}")
    return home / ("Library/Caches" if platform == "darwin" else ".cache") / name


_context: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "kernel_dispatch_configure",
    default={},  # noqa: B039  (never mutated: configure() sets a new dict)
)


class configure(contextlib.ContextDecorator):
    """`with kernel_dispatch.configure(level="O1"): ...` for graphs compiled inside the block.

    Also a decorator. Values are checked at once, and the setting belongs to this thread or task.
    Graphs that are compiled already keep what they were compiled with.
    """

    def __init__(self, **values: Any) -> None:
        self._values = {
            name: _option(name, "configure()").parse(value, "configure()")
            for name, value in values.items()
        }
        self._tokens: list[contextvars.Token[Mapping[str, Any]]] = []
        self._entered = False

    def __enter__(self) -> configure:
        self._entered = True
        self._tokens.append(_context.set({**_context.get(), **self._values}))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _context.reset(self._tokens.pop())

    def __del__(self) -> None:
        # A bare `configure(level="O1")` looks as if it did something: say that it did not.
        if not getattr(self, "_entered", True):
            warnings.warn(
                "kernel_dispatch.configure(...) was called without `with`: nothing was configured.",
                UnifiedWarning,
                stacklevel=2,
            )


# What configure() blocks ask for that are in force on this thread; asked in every call of a graph.
in_context = _context.get


def _option(name: str, source: str) -> Option:
    if name not in _BY_NAME:
        error = unknown("option", name, _BY_NAME, source)
        if _is_inductors(name):
            raise SettingError(f'{error} It is an option of Inductor: inductor={{"{name}": ...}}.')
        raise error
    return _BY_NAME[name]


def _is_inductors(name: str) -> bool:
    import torch._inductor

    return name in torch._inductor.list_options()


def _mode_level(mode: str) -> tuple[Level, str | None]:
    """mode= takes Inductor's mode strings and, because users try it, the names of levels."""
    if not isinstance(mode, str):
        raise SettingError(
            f"mode={mode!r}: give one of {', '.join(MODES)}, or the name of a level."
        )
    if mode in MODES:
        return MODES[mode], mode
    try:
        return Level.parse(mode), None
    except SettingError:
        accepted = [*MODES, *(level.name for level in Level), "none", "conservative"]
        raise unknown("mode", mode, [*accepted, "balanced", "aggressive"], "mode=") from None


def resolve(
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The effective settings, each with its source; raises SettingError on the first mistake."""
    environ = os.environ if environ is None else environ
    if options is not None and not isinstance(options, Mapping):
        raise SettingError(f"options={options!r}: give a dict of {', '.join(_BY_NAME)}.")
    options = dict(options or {})
    for name in options:
        _option(name, "options=")
    _warn_of_unknown_variables(environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    inductor_mode = None
    for option in OPTIONS:
        values[option.name], sources[option.name] = _effective(option, options, environ)
    if mode is not None:
        level, inductor_mode = _mode_level(mode)
        if "level" not in options:
            values["level"], sources["level"] = level, "mode="
    return Settings(**values, mode=inductor_mode, sources=tuple(sorted(sources.items())))


def _effective(
    option: Option, options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Any, str]:
    if option.name in options:
        source = "options="
        return option.parse(options[option.name], source), source
    context = _context.get()
    if option.name in context:
        return context[option.name], "configure()"
    if option.env and environ.get(option.env, "").strip():
        return option.parse(environ[option.env], option.env), option.env
    if option.name == "provider" and (chosen := default_backend.chosen()) is not None:
        return chosen, SET_DEFAULT
    return option.default, "default"


_warned_variables: set[str] = set()


def _warn_of_unknown_variables(environ: Mapping[str, str]) -> None:
    """UNIFIED_LEVLE=O3 must not be ignored without a word."""
    for name in environ:
        if name.startswith("UNIFIED_") and name not in _KNOWN_ENV | _warned_variables:
            _warned_variables.add(name)
            guess = nearest(name, _KNOWN_ENV)
            hint = f" Did you mean {guess}?" if guess else ""
            warnings.warn(
                f"the environment variable {name} means nothing to kernel_dispatch.{hint} "
                f"Accepted: {', '.join(sorted(_KNOWN_ENV))}.",
                UnifiedWarning,
                stacklevel=2,
            )


def list_options() -> list[str]:
    """The names that `torch.compile(..., options={...})` and `configure(...)` accept."""
    return list(_BY_NAME)


def list_levels() -> list[str]:
    """The levels, lowest first."""
    return [level.name for level in Level]
