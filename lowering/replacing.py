"""Functions of torch's that are replaced while `unified` compiles, and put back after.

Threads may compile at once, and end in another order than they began: what one of them found there
may be the other's replacement. So the first one replaces, and the last one puts back.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.RLock()
_inside: dict[tuple[int, str], tuple[int, Any]] = {}  # how many are, and torch's own function


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make`: of torch's function what stands for it inside. Where torch lacks it, nothing is."""
    key = (id(owner), name)
    with _lock:
        count, original = _inside.get(key, (0, inspect.getattr_static(owner, name, None)))
        if not count and original is not None:
            setattr(owner, name, make(original))
        _inside[key] = (count + 1, original)
    try:
        yield
    finally:
        with _lock:
            count, original = _inside.pop(key)
            if count > 1:
                _inside[key] = (count - 1, original)
            elif original is not None:
                setattr(owner, name, original)
