"""Colour and marks: what each environment and each stream leads to."""

from __future__ import annotations

import io

import pytest

from kernel_dispatch.terminal import STATUSES, Style, style_of, write

pytestmark = pytest.mark.quick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


@pytest.mark.parametrize(
    ("environ", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),  # present and empty means nothing
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": ""}, True, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"NO_COLOR": "1", "CLICOLOR_FORCE": "1"}, False, False),
        ({"NO_COLOR": "", "FORCE_COLOR": "1"}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"TERM": "xterm-256color"}, True, False),
    ],
)
def test_colour(environ: dict[str, str], on_terminal: bool, elsewhere: bool) -> None:
    assert style_of(Terminal(), environ).colour is on_terminal
    assert style_of(io.StringIO(), environ).colour is elsewhere


def test_colour_reads_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert style_of(io.StringIO()).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not style_of(io.StringIO()).colour


def test_a_closed_stream_is_no_terminal() -> None:
    stream = Terminal()
    stream.isatty = io.StringIO.isatty.__get__(stream)  # type: ignore[method-assign]
    stream.close()
    assert style_of(stream, {}) == Style(colour=False, unicode=True, width=None)


@pytest.mark.parametrize(
    ("encoding", "carries"), [("utf-8", True), ("ascii", False), ("latin-1", False)]
)
def test_marks_follow_the_encoding(encoding: str, carries: bool) -> None:
    style = style_of(encoded(encoding), {})
    assert style.unicode is carries
    for status in STATUSES:
        style.mark(status).encode(encoding)  # raises where the mark does not fit
    assert (style.mark("ok") == "✓") is carries


@pytest.mark.parametrize("unicode", [True, False])
def test_every_status_has_a_mark_of_its_own(unicode: bool) -> None:
    marks = [Style(unicode=unicode).mark(status) for status in STATUSES]
    assert len(set(marks)) == len(STATUSES) == 4
    assert all(len(mark) == 1 for mark in marks)


def test_escape_codes_only_with_colour() -> None:
    plain, coloured = Style(), Style(colour=True)
    assert plain.bold("x") == "x"
    assert coloured.bold("x") == "\x1b[1mx\x1b[0m"
    assert "\x1b" not in plain.mark("problem")
    assert coloured.mark("problem").startswith("\x1b[") and "✗" in coloured.mark("problem")


def test_width_is_known_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert style_of(Terminal(), {}).width == 77
    assert style_of(io.StringIO(), {}).width is None


def test_write_survives_a_narrow_encoding() -> None:
    stream = encoded("ascii")
    write("caf\u00e9 \u2713", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b"caf\\xe9 \\u2713\n"  # type: ignore[attr-defined]


def test_write_changes_nothing_that_fits() -> None:
    stream = io.StringIO()
    write("café ✓", stream)
    assert stream.getvalue() == "café ✓\n"
