"""`python -m tests.lanes`: a lane that runs out of time says so, and a failure is never lost."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest

from tests.lanes import BY_NAME
from tests.lanes import __main__ as lanes


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lane's environment is this one."""
    monkeypatch.setattr(lanes, "_python", lambda lane: sys.executable)
    monkeypatch.setattr(lanes, "_cache", lambda lane: tmp_path / "cache")


def test_too_little_time_for_an_environment_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_is_current", lambda lane: False)
    assert lanes.main(["xla", "--minutes", "-3"]) == 0
    assert "SKIPPED: lane xla was NOT run. Its environment takes about" in capfd.readouterr().out


@pytest.mark.usefixtures("here")
def test_what_was_stopped_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert lanes._run(BY_NAME["xla"], ["timeit", "while True: pass"], time.monotonic() + 0.2) == 0
    assert "NOT FINISHED: lane xla: the time was up: timeit" in capfd.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("seconds", [math.inf, 600])
def test_a_failure_is_the_status(tmp_path: Path, seconds: float) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_failing():\n    raise AssertionError\n")
    arguments = ["-p", "no:xdist", f"--rootdir={tmp_path}", "-c", "/dev/null", str(failing)]
    assert lanes._pytest(BY_NAME["xla"], arguments, time.monotonic() + seconds) == 1
