"""What `set_default_backend()` chose: by this thread or task, else by any in this process.

A thread that chose keeps its choice, whatever others choose later; threads that never chose follow
the last choice of the process.
"""

from __future__ import annotations

import contextvars

_UNSET = ""
_here: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "kernel_dispatch_default_backend", default=_UNSET
)
_process: str | None = None


def chosen() -> str | None:
    """A name of the fourteen, or None: nothing was chosen."""
    here = _here.get()
    return _process if here == _UNSET else here


def choose(name: str | None) -> None:
    """From now on here, and wherever nobody chose for himself; None takes the choice back."""
    global _process
    _process = name
    _here.set(_UNSET if name is None else name)
