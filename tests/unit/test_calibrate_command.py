"""`calibrate` on the command line, and what `doctor` tells of profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kernel_dispatch import calibration
from kernel_dispatch.diagnosis import Calibration, diagnose
from kernel_dispatch.doctor import _calibration
from lowering import candidates, measuring
from lowering.profile import MachineProfile, from_text
from tests.unit.conftest import Run
from tests.unit.test_profile import CONDITIONS, PROFILE, RATES
from tests.unit.toy_facts import replaced, row_of

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("clean_environment")]


@pytest.fixture
def cache(tmp_path: Path, clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measuring takes no time and gives the toy rates."""

    def measure(budget: float) -> MachineProfile:
        return dataclasses.replace(PROFILE, seconds=budget)

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(candidates, "get_ready", lambda folder: None)
    monkeypatch.setenv("UNIFIED_CACHE_DIR", str(tmp_path))
    calibration.forget()
    return tmp_path


# --- calibrate ------------------------------------------------------------------------------------


def test_the_table(run: Run, cache: Path) -> None:
    done = run("calibrate", "--budget", "1.5")
    (file,) = cache.glob("*.json")
    assert (done.code, done.err) == (0, "")
    assert "measured in 1.5 s" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["float32", "mkldnn", "-", "-", "209.0*"] in lines
    assert ["float32", "mkl", "18.0*", "-", "146.0"] in lines
    assert "read 33.1 GB/s, copy 31.5 GB/s" in done.out
    assert "1.2 us" in done.out
    assert "a note" in done.out
    assert f"stored in {file}" in done.out
    assert "other processes" not in done.out


def test_json(run: Run, cache: Path) -> None:
    told = json.loads(run("calibrate", "--json").out)
    assert told["note"] == ""
    stored = Path(told["stored"])
    assert from_text(json.dumps(told["profile"])) == from_text(stored.read_text())
    assert told["profile"]["seconds"] == measuring.BUDGET_S


def test_a_folder_that_cannot_be_written(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("UNIFIED_CACHE_DIR", str(cache / "file" / "folder"))
    done = run("calibrate")
    assert done.code == 1
    assert "209.0*" in done.out
    assert "it could not be stored" in done.out
    assert json.loads(run("calibrate", "--json").out)["stored"] is None


def test_a_busy_machine(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = dataclasses.replace(PROFILE, busy=0.5, read_gbs=0.0)
    monkeypatch.setattr(measuring, "measure", lambda budget: busy)
    done = run("calibrate")
    assert done.code == 0
    assert "other processes took 50% of the time" in done.out
    assert "memory  not measured" in done.out


@pytest.mark.parametrize("budget", ["0", "-1", "soon", "nan", "1e9"])
def test_wrong_budget(run: Run, budget: str) -> None:
    done = run("calibrate", "--budget", budget)
    assert done.code == 2
    assert "is not a number of seconds" in done.err


def test_a_bad_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CALIBRATION", "sometimes")
    done = run("calibrate")
    assert done.code == 2
    assert "unknown calibration 'sometimes'" in done.err


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_shows_the_profile() -> None:
    facts = replaced(calibration=Calibration(PROFILE, path="/cache/profile.json"))
    row = row_of(facts, "profile")
    assert (row.section, row.status, row.fix) == ("Calibration", "ok", "")
    assert row.text.startswith("measured 2026-01-01T00:00:00+00:00 in 2.5 s with 2 threads")
    assert row.text.endswith("/cache/profile.json")
    assert row.details["rates"]
    assert row_of(facts, "gemm float32").text == (
        "vector: mkl 18; large: mkldnn 209, mkl 146, eager 100 GFLOP/s"
    )
    assert row_of(facts, "bandwidth").text == "read 33.1 GB/s, copy 31.5 GB/s"
    assert row_of(facts, "call overhead").text == "1.2 us"


def test_doctor_warns_of_a_disturbed_profile() -> None:
    disturbed = dataclasses.replace(PROFILE, busy=0.5)
    row = row_of(replaced(calibration=Calibration(disturbed)), "profile")
    assert (row.status, row.fix) == ("warn", "python -m kernel_dispatch calibrate")


@pytest.mark.parametrize(
    ("setting", "then"), [("auto", "measured when a graph first needs it"), ("off", "off")]
)
def test_doctor_without_a_profile(setting: str, then: str) -> None:
    found = Calibration(note="no profile is stored", setting=setting)
    row = row_of(replaced(calibration=found), "profile")
    assert (row.status, row.fix) == ("info", "python -m kernel_dispatch calibrate")
    assert f"no profile is stored ({then})" in row.text
    assert not [row for row in diagnose(replaced()) if row.section == "Calibration"]


def test_doctor_tells_of_profiles_that_do_not_hold(cache: Path) -> None:
    for number, changed in enumerate(({"torch": "2.8.0"}, {"threads": 96})):
        other = dataclasses.replace(measuring.conditions(), **changed)
        text = json.dumps(MachineProfile(other, RATES).as_dict())
        (cache / f"profile-{number}.json").write_text(text)
    (cache / "profile-broken.json").write_text("{")
    found = _calibration({"UNIFIED_CACHE_DIR": str(cache), "UNIFIED_CALIBRATION": "off"})
    assert found.profile is None
    assert found.setting == "off"
    assert found.others == ("with torch 2.8.0", "with 96 threads")
    text = row_of(replaced(calibration=found), "profile").text
    assert "there is one with torch 2.8.0, which does not hold here" in text


def test_doctor_reads_what_calibrate_stored(run: Run, cache: Path) -> None:
    run("calibrate")
    found = _calibration({"UNIFIED_CACHE_DIR": str(cache)})
    assert found.profile is not None
    assert found.profile.rates == RATES
    assert found.profile.conditions != CONDITIONS  # those of this machine, not of the toy


def test_a_bad_setting_elsewhere_does_not_hide_the_profile(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("calibrate")
    environ = {"UNIFIED_CACHE_DIR": str(cache), "UNIFIED_LEVEL": "O9"}
    assert _calibration(environ).profile is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "empty"))  # the default counts there
    assert _calibration({"UNIFIED_THREADS": "many"}).note == "no profile is stored"
