"""What the user asked for: the only reader of `options=`, `mode=`, `configure()` and UNIFIED_*.

Precedence, for each option on its own: option > context > environment > default. Every value
remembers its source, so that a report can say not only "O1" but "O1, from UNIFIED_LEVEL".
The provider's default is what `set_default_backend()` chose.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kernel_dispatch import default_backend
from lowering import providers, targets
from lowering.errors import SettingError, UnifiedWarning, nearest, unknown
from lowering.levels import Level

if TYPE_CHECKING:
    from kernel_dispatch.config.backend_file import BackendFile


@dataclass(frozen=True)
class DeviceWish:
    """A forced target, with the index of the device if the user named one (`cuda:1`)."""

    target: str
    index: int | None = None

    def __str__(self) -> str:
        return self.target if self.index is None else f"{self.target}:{self.index}"


@dataclass(frozen=True)
class Option:
    """One option: its spellings, its default, how a value is read, what the documentation says."""

    name: str
    env: str | None
    default: Any
    parse: Callable[[Any, str], Any]
    accepted: str
    summary: str


def _parse_flag(value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    word = str(value).strip().lower()
    if word not in words:
        raise unknown("truth value", value, words, source)
    return words[word]


def _parse_device(value: Any, source: str) -> DeviceWish | None:
    """A target, an alias, either with an index, or a torch.device; "auto" and None force none."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    name, _, index = str(value).strip().lower().partition(":")
    target = targets.resolve_name(name)
    if name == "gpu":
        raise SettingError(
            f"device {value!r} (from {source}) could be several: give cuda, rocm, xpu or mps."
        )
    if target is None:
        raise unknown("device", value, ["auto", *targets.accepted_names()], source)
    if index and not (index.isascii() and index.isdigit()):
        record = targets.find(target)
        if index.startswith(("sm", "gfx")) or (record is not None and index in record.on_paper):
            raise SettingError(
                f"device {value!r} (from {source}) names a kind of device: what would happen there "
                f"is told by `explain --device {value}` and kernel_dispatch.dry_run."
            )
        raise SettingError(f"device {value!r} (from {source}): the index must be a number >= 0.")
    return DeviceWish(target, int(index) if index else None)


def _parse_disable(value: Any, source: str) -> frozenset[str]:
    names = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(value, bytes):
            raise TypeError("bytes are not names")
        wanted = {str(name).strip().lower() for name in names} - {""}
    except TypeError:
        raise SettingError(
            f"disable={value!r} (from {source}): give provider names, as a list or with commas."
        ) from None
    known = providers.names()
    for name in sorted(wanted):
        if name not in known:
            raise unknown("provider", name, known, source)
    if "eager" in wanted:
        raise SettingError(
            f"disable={value!r} (from {source}): eager is the last provider and cannot be "
            f"disabled; use strict=True to make a fallback to eager an error."
        )
    return frozenset(wanted)


def _parse_provider(value: Any, source: str) -> str | None:
    """A name or alias of the fourteen; None and "auto" choose none."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    from kernel_dispatch.registry import table

    return table.demand(value, source).name


def _parse_config(value: Any, source: str) -> BackendFile | None:
    """The file is read at once, so that a mistake in it is told where it is named."""
    if value is None:
        return None
    from kernel_dispatch.config.backend_file import BackendFile, load_backend_config

    return value if isinstance(value, BackendFile) else load_backend_config(value, source)


def _parse_threads(value: Any, source: str) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    number = int(text) if text.isascii() and text.isdigit() else 0
    if isinstance(value, bool) or not 1 <= number <= _MOST_THREADS:
        raise SettingError(
            f"threads={value!r} (from {source}): give a whole number from 1 to {_MOST_THREADS}."
        )
    return number


_MOST_THREADS = 4096


def _parse_tolerance(value: Any, source: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise SettingError(
            f"tolerance={value!r} (from {source}): give a relative error from 0 to 1, such as 0.01."
        )
    return number


def _parse_buckets(value: Any, source: str) -> tuple[int, ...] | None:
    """None: a graph for each size. (): our own sizes to round up to."""
    words: Any = value.split(",") if isinstance(value, str) else value
    if value is None or isinstance(value, bool) or not isinstance(words, (list, tuple)):
        words = [value]
    words = [str(word).strip().lower() for word in words]
    if len(words) == 1 and words[0] in _BUCKET_WORDS:
        return _BUCKET_WORDS[words[0]]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise SettingError(
            f"buckets={value!r} (from {source}): give off, auto, or sizes above 0 such as "
            f"[64, 128, 256]."
        )
    return tuple(sorted({int(word) for word in words}))


_BUCKET_WORDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("off", "none", "false", "0", "no"), None),
    **dict.fromkeys(("auto", "true", "on", "yes"), ()),
}


def _parse_cache_dir(value: Any, source: str) -> str | None:
    """An absolute path; it need not exist yet. None is the user's own cache folder."""
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise SettingError(f"cache_dir={value!r} (from {source}): give the path of a folder.")
    folder = os.path.abspath(os.path.expanduser(text.strip()))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SettingError(f"cache_dir={value!r} (from {source}): {folder} is not a folder.")
    return folder


def _parse_calibration(value: Any, source: str) -> str:
    word = str(value).strip().lower()
    if word not in CALIBRATION:
        raise unknown("calibration", value, CALIBRATION, source)
    return word


CALIBRATION = ("auto", "off")


def _parse_inductor(value: Any, source: str) -> tuple[tuple[str, Any], ...]:
    """Config of Inductor for advanced users, every key checked against the installed torch."""
    if not isinstance(value, Mapping):
        raise SettingError(f"inductor={value!r} (from {source}): give a dict of Inductor config.")
    if value:
        import torch._inductor

        accepted = torch._inductor.list_options()
        for key in value:
            if key not in accepted:
                guess = nearest(str(key), accepted)
                hint = f" Did you mean {guess!r}?" if guess else ""
                raise SettingError(
                    f"unknown Inductor option {key!r} (from {source}).{hint} "
                    f"torch._inductor.list_options() prints all {len(accepted)} that are accepted."
                )
        _check_types(value, source)
    return tuple(sorted(value.items()))


def _check_types(value: Mapping[str, Any], source: str) -> None:
    """Inductor itself would fail much later, with an error that does not name the option."""
    from torch._inductor import config

    defaults = config.get_config_copy()
    for key, given in value.items():
        wanted = type(defaults.get(key))
        fits = isinstance(given, wanted) and isinstance(given, bool) == (wanted is bool)
        if wanted in (bool, int, str) and not fits and given is not None:
            raise SettingError(
                f"inductor option {key}={given!r} (from {source}): give a {wanted.__name__}."
            )


OPTIONS: tuple[Option, ...] = (
    Option(
        "level",
        "UNIFIED_LEVEL",
        Level.O2,
        Level.parse,
        "O0-O3, none, conservative, balanced, aggressive",
        "The contract on numerics and compile time.",
    ),
    Option(
        "device",
        "UNIFIED_DEVICE",
        None,
        _parse_device,
        "auto, a target or an alias, with an index if wanted (cuda:1)",
        "Force a target. Forced and absent is an error; auto follows the tensors.",
    ),
    Option(
        "strict",
        "UNIFIED_STRICT",
        False,
        _parse_flag,
        "true or false",
        "Any fallback becomes an error that names what failed and why.",
    ),
    Option(
        "disable",
        "UNIFIED_DISABLE",
        frozenset(),
        _parse_disable,
        "provider names, as a list or separated by commas",
        "Providers that must not be used.",
    ),
    Option(
        "provider",
        None,
        None,
        _parse_provider,
        "auto, or one of the fourteen providers (mkl, mkldnn, openmp, triton ...)",
        "On its targets, the others that compute regions are off; graphs elsewhere are left alone. "
        "By default what set_default_backend() chose.",
    ),
    Option(
        "config",
        "UNIFIED_CONFIG",
        None,
        _parse_config,
        "the path of a config.cmake file",
        "Which of the fourteen providers may be used: set(USE_MKL ON) ...; one that the file does "
        "not mention is off.",
    ),
    Option(
        "threads",
        "UNIFIED_THREADS",
        None,
        _parse_threads,
        "a whole number from 1 to 4096",
        "CPU threads while a graph compiles and runs; restored after each call.",
    ),
    Option(
        "tolerance",
        "UNIFIED_TOLERANCE",
        1e-2,
        _parse_tolerance,
        "a number from 0 to 1",
        "At O3: how far off (relative L2 error) a layer in fewer bits may be; each is checked on "
        "its first inputs. 0 forbids fewer bits.",
    ),
    Option(
        "buckets",
        "UNIFIED_BUCKETS",
        None,
        _parse_buckets,
        "off, auto, or a list of sizes",
        "On targets that compile fixed sizes only (xla): round dynamic sizes up to these, where "
        "padding provably changes no result. auto: powers of two and one and a half times those.",
    ),
    Option(
        "cache_dir",
        "UNIFIED_CACHE_DIR",
        None,
        _parse_cache_dir,
        "the path of a folder; it is made when it is needed",
        "Where machine profiles are kept; by default the user's own cache folder: "
        "$XDG_CACHE_HOME/kernel_dispatch, else what the platform has for that.",
    ),
    Option(
        "calibration",
        "UNIFIED_CALIBRATION",
        "auto",
        _parse_calibration,
        "auto or off",
        "auto measures this machine once, for 3 seconds, when a graph needs it and no profile "
        "is stored; off only uses a stored one.",
    ),
    Option(
        "inductor",
        None,
        (),
        _parse_inductor,
        "a dict of torch._inductor.config entries",
        "Passed on to Inductor for these graphs only.",
    ),
)
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
    tolerance: float = 1e-2
    buckets: tuple[int, ...] | None = None
    cache_dir: str | None = None
    calibration: str = "auto"
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
            "tolerance": self.tolerance,
            "buckets": "off" if self.buckets is None else list(self.buckets) or "auto",
            "cache_dir": str(self.cache_folder),
            "calibration": self.calibration,
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


def in_context() -> bool:
    """Is any configure() block in force on this thread?"""
    return bool(_context.get())


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
