"""The configuration file that says which of the fourteen providers may be used: `config.cmake`.

    set(USE_CUDA ON)
    set(USE_MKL OFF)   # a provider that is not mentioned is off

Nothing is built from it: it is read when a graph is compiled (`UNIFIED_CONFIG` names it).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_dispatch.registry.table import BY_NAME, OWN_TARGET, TABLE
from lowering.errors import SettingError, UnifiedWarning, nearest

log = logging.getLogger(__name__)

_FLAGS = {info.flag: info.name for info in TABLE}
# Of the original's build, which this project does not have: accepted while they ask for nothing.
_BUILD_FLAGS = ("BUILD_CPP_EXAMPLES", "USE_FORMAL_VERIFIER")
_OLD = re.compile(r"YIRAGE_BACKEND_USE_(\w+)")
_WORDS = {
    **dict.fromkeys(("ON", "TRUE", "YES", "Y", "1"), True),
    **dict.fromkeys(("OFF", "FALSE", "NO", "N", "0"), False),
}
_SET = re.compile(r"\bset\s*\(\s*([A-Za-z_0-9]+)\s*\"?([^\s\")]*)\"?[^)]*\)", re.IGNORECASE)
_COMMENT = re.compile(r"#.*")
NOTHING_ON = "At least one backend must be enabled in config.cmake"


@dataclass(frozen=True)
class BackendFile:
    """A configuration file as it was read. Hashable and picklable, as settings have to be."""

    path: str
    enabled: frozenset[str]

    def enables(self, name: str) -> bool:
        return name in self.enabled

    @property
    def flags(self) -> dict[str, bool]:
        """All fourteen flags, in the order of the table."""
        return {info.flag: info.name in self.enabled for info in TABLE}

    def why_off(self, name: str) -> str:
        return f"{name} is {self._off(name)}"

    def _off(self, name: str) -> str:
        return f"off in {self.path} ({BY_NAME[name].flag})"

    def target_off(self, target: str) -> str:
        """Why no graph goes to this target; empty where one may. Not every target has a flag."""
        name = next((n for n, own in OWN_TARGET.items() if own == target), None)
        return self.why_off(name) if name is not None and name not in self.enabled else ""

    def providers_off(self) -> dict[str, str]:
        """Those of our providers that must not compute -> by what."""
        return {
            provider: self._off(info.name)
            for info in TABLE
            if info.name not in self.enabled
            for provider in info.providers
        }

    def as_dict(self) -> dict[str, object]:
        return {"file": self.path, "on": [i.name for i in TABLE if i.name in self.enabled]}


def load_backend_config(path: str | os.PathLike[str], source: str = "") -> BackendFile:
    """Read such a file. Every mistake in it is an error that names file and line."""
    if isinstance(path, bool) or not isinstance(path, (str, os.PathLike)) or not str(path).strip():
        raise SettingError(f"config={path!r}{_from(source)}: give the path of a config.cmake file.")
    file = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    try:
        status = file.stat()
        return _read(file, (status.st_mtime_ns, status.st_size))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingError(
            f"the configuration file {file}{_from(source)} cannot be read: {why}."
        ) from None


def get_backend_macros(config_file: str | os.PathLike[str]) -> list[tuple[str, None]]:
    """What the original's build defined for each enabled provider, in the order of the table."""
    flags = load_backend_config(config_file).flags
    names = [flag.removeprefix("USE_") for flag, on in flags.items() if on]
    return [(f"YIRAGE_BACKEND_{name}_ENABLED", None) for name in names]


def _from(source: str) -> str:
    return f" (from {source})" if source else ""


@functools.lru_cache(maxsize=32)
def _read(file: Path, version: tuple[int, int]) -> BackendFile:
    """Once for each version of the file, so that what it warns of is said once."""
    on: dict[str, bool] = {}
    for line, name, word in _assignments(file.read_text(encoding="utf-8")):
        place = f"{file}:{line}"
        if (flag := _flag(name, place)) is None:
            continue
        if word.upper() not in _WORDS:
            raise SettingError(f"{place}: {name} is {word!r}; give one of {', '.join(_WORDS)}.")
        on[flag] = _WORDS[word.upper()]
    for flag in _BUILD_FLAGS:
        if on.pop(flag, False):
            _warn(f"{file}: {flag} asks for a C++ build, and this project has none")
    enabled = frozenset(_FLAGS[flag] for flag, value in on.items() if value)
    if not enabled:
        raise SettingError(f"{NOTHING_ON}: {file} switches on none of {', '.join(_FLAGS)}.")
    if not enabled & OWN_TARGET.keys():
        switches = ", ".join(f"USE_{name.upper()}" for name in OWN_TARGET)
        log.warning("%s switches on none of %s: every graph is left to eager", file, switches)
    return BackendFile(str(file), enabled)


def _assignments(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, word) of every `set(...)`, which may run over several lines."""
    text = "\n".join(_COMMENT.sub("", line) for line in text.splitlines())
    for match in _SET.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2]


def _flag(name: str, place: str) -> str | None:
    """The flag's name of today; None for CMake variables that are no business of ours."""
    flag = name.upper()
    if old := _OLD.fullmatch(flag):
        flag = f"USE_{old[1]}"
        _warn(f"{place}: {name} is the old name of {flag}", DeprecationWarning)
    if flag in _FLAGS or flag in _BUILD_FLAGS:
        return flag
    if flag.startswith("USE_"):
        guess = nearest(flag, _FLAGS)
        hint = f" Did you mean {guess}?" if guess else ""
        _warn(f"{place}: {name} names no provider and changes nothing.{hint}")
    return None


def _warn(text: str, kind: type[Warning] = UnifiedWarning) -> None:
    warnings.warn(text, kind, stacklevel=2)
