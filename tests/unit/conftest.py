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
    """No variable that changes what a command does or how it looks. Those of the test run stay:
    without them a command would build the kernels anew, in the user's own cache."""
    of_the_run = ("UNIFIED_CACHE_DIR", "UNIFIED_CALIBRATION")
    for name in [*os.environ]:
        changes = name.startswith("UNIFIED_") and name not in of_the_run
        if changes or name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
            monkeypatch.delenv(name)
