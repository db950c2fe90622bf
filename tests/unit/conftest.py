"""The command line as a function, for the tests of the commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kernel_dispatch import cli


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Done:
        code = cli.main(list(arguments))
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that changes what a command does or how it looks."""
    for name in [*os.environ]:
        if name.startswith("UNIFIED_") or name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
            monkeypatch.delenv(name)
