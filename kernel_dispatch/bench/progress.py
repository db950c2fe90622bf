"""What a long run is doing, and how long it will still take, on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """One line that rewrites itself on a terminal; elsewhere a line per workload."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = time.perf_counter()
        self._workload = ""

    def __call__(self, text: str, share: float) -> None:
        line = f"[{share:4.0%}] {text}{self._left(share)}"
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line[:110]}")
        else:
            workload = text.partition(": ")[0]
            if workload == self._workload:
                return
            self._workload = workload
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def done(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _left(self, share: float) -> str:
        """From what it took until now; the first workload also starts the compilers."""
        elapsed = time.perf_counter() - self._start
        return f", {duration(elapsed / share - elapsed)} left" if share > 0.02 else ""


def duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"
