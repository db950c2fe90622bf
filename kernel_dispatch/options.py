"""What can be asked for: every option with its spellings, its default, and how a value is read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowering import providers, targets
from lowering.errors import SettingError, nearest, unknown
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


def _parse_keep_memory(value: Any, source: str) -> int | None:
    """Bytes; None is what this machine can spare."""
    word = "off" if value is False else str(value).strip().lower()
    if value is None or word == "auto":
        return None
    if word in ("off", "none", "false", "no"):
        return 0
    found = re.fullmatch(r"(\d+)\s*(?:([kmgt])i?)?b?", word, re.ASCII)
    if found is None:
        raise SettingError(
            f"keep_memory={value!r} (from {source}): give auto, off, or a size such as 512MB."
        )
    size = int(found[1]) << (10 * " kmgt".index(found[2] or " "))
    if size >= 1 << 60:
        raise SettingError(f"keep_memory={value!r} (from {source}): no machine has so much.")
    return size


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


def _one_of(name: str, words: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, source: str) -> str:
        word = str(value).strip().lower()
        if word not in words:
            raise unknown(name, value, words, source)
        return word

    return parse


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
        "keep_memory",
        "UNIFIED_KEEP_MEMORY",
        None,
        _parse_keep_memory,
        "auto, off, or a size such as 512MB",
        "On CPU from O2 on: how much memory of freed tensors compiled graphs keep for their next "
        "call, instead of asking the system for it again. auto: a sixteenth of the machine's, at "
        "most 2 GB. The process has one such store; the largest size that was asked for holds.",
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
        _one_of("calibration", ("auto", "off")),
        "auto or off",
        "auto measures this machine once, for 3 seconds, when a graph needs it and no profile "
        "is stored; off only uses a stored one.",
    ),
    Option(
        "guards",
        "UNIFIED_GUARDS",
        "pinned",
        _one_of("guards", ("pinned", "torch")),
        "pinned or torch",
        "How each call finds out that a model's modules and weights are as the graph needs them. "
        "torch looks up each of them; pinned first asks whether anything changed at all (graphs "
        "on CPU, in a process that compiled at O2 or above, Python 3.10 to 3.14 but 3.13.0).",
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
