"""What a terminal can show: colour, marks, width. The only file that knows escape codes.

Conventions disagree on whether NO_COLOR or FORCE_COLOR wins when both are set. Here NO_COLOR does:
it is what a person sets for all programs, FORCE_COLOR is what a CI system sets for one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

# status -> (mark, mark in ASCII, ANSI colour)
_MARKS = {
    "ok": ("✓", "+", "32"),
    "info": ("•", "-", "2"),
    "warn": ("!", "!", "33"),
    "problem": ("✗", "x", "1;31"),
}
STATUSES = tuple(_MARKS)


@dataclass(frozen=True)
class Style:
    """What the stream can show. `width` None: not a terminal, lines stay as long as they are."""

    colour: bool = False
    unicode: bool = True
    width: int | None = None

    def mark(self, status: str) -> str:
        mark, ascii_mark, code = _MARKS[status]
        return self._painted(mark if self.unicode else ascii_mark, code)

    def bold(self, text: str) -> str:
        return self._painted(text, "1")

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def style_of(stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
    environ = os.environ if environ is None else environ
    return Style(
        colour=_colour(stream, environ),
        unicode=_carries(stream, "".join(mark for mark, _, _ in _MARKS.values())),
        width=shutil.get_terminal_size().columns if _is_terminal(stream) else None,
    )


def _colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    if environ.get("NO_COLOR"):  # "when present and not an empty string"
        return False
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        if value := environ.get(name):
            return value != "0"
    return environ.get("TERM") != "dumb" and _is_terminal(stream)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a stand-in for a stream, or a closed one
        return False


def _carries(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def write(text: str, stream: TextIO | None = None) -> None:
    """Print a line; what the encoding cannot carry (a path, a CPU's name) becomes `\\xe9`."""
    stream = sys.stdout if stream is None else stream
    if not _carries(stream, text):
        encoding = getattr(stream, "encoding", None) or "ascii"
        try:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        except LookupError:
            text = text.encode("ascii", "backslashreplace").decode("ascii")
    print(text, file=stream)


def write_json(value: Any) -> None:
    """For programs, to stdout."""
    write(json.dumps(value, indent=2, default=str))
