"""Region kernels tell here that they ran; whoever runs a graph listens, on its own thread."""

from __future__ import annotations

import threading
from typing import Protocol


class Listener(Protocol):
    def region_ran(self, region: str, provider: str, times: int = 1) -> None: ...


class _Current(threading.local):
    listener: Listener | None = None


current = _Current()


def region_ran(region: str, provider: str) -> None:
    if (listener := current.listener) is not None:
        listener.region_ran(region, provider)
