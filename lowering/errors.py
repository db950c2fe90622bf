"""Every exception and warning class of the project: one class per user mistake.

A capability that says no is *not* here: that is a `Reason`, a value. Exceptions are for wrong
input, for a wish that cannot be met, and for strict mode.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnifiedError(Exception):
    """Base class: `except UnifiedError` catches everything that this project raises on purpose."""


class SettingError(UnifiedError, ValueError):
    """An option, level, device, provider or environment value that does not exist."""


class BackendNotAvailableError(UnifiedError, ValueError, RuntimeError):
    """A device was asked for by name and is not on this machine."""


class StrictModeError(UnifiedError, RuntimeError):
    """Something would have fallen back and `strict` forbids it."""


class OperandError(UnifiedError, ValueError):
    """An argument of an operation does not fit: its rank, sizes, dtype, device or layout."""


class RegistrationError(UnifiedError, ValueError):
    """A third-party target whose record is malformed or whose name is taken."""


class UnifiedWarning(UserWarning):
    """Every warning of this project; filter on this class to silence or to escalate them."""


def nearest(value: str, accepted: Iterable[str]) -> str | None:
    """The accepted spelling that the user probably meant, if one is near."""
    by_lower = {name.lower(): name for name in accepted}
    matches = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


def unknown(what: str, value: object, accepted: Iterable[str], source: str = "") -> SettingError:
    """The one sentence for every unknown name: the value, what is accepted, the nearest match."""
    names = sorted(set(accepted))
    guess = nearest(str(value), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    origin = f" (from {source})" if source else ""
    return SettingError(f"unknown {what} {value!r}{origin}.{hint} Accepted: {', '.join(names)}.")
