"""Where profiles are kept, when one is measured, and what stands in the way of either.

Measuring is a stand-in here, except in one test.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernel_dispatch import calibration
from kernel_dispatch.calibration import calibrate, current, find, path_of
from kernel_dispatch.settings import Settings
from lowering import candidates, measuring
from lowering.errors import SettingError
from lowering.profile import MachineProfile
from tests.unit.test_measuring import of_torch
from tests.unit.test_profile import RATES

pytestmark = pytest.mark.quick


class Measured:
    """Stands in for `measuring`: counts, and answers with what a test sets."""

    def __init__(self) -> None:
        self.times = 0
        self.glances = 0.0
        self.busy = 0.0
        self.error: Exception | None = None
        self.seen: list[tuple[int, bool, bool]] = []
        self.ready: list[Path] = []

    def get_ready(self, folder: Path) -> None:
        assert self.times == len(self.ready), "not before the measurement"
        self.ready.append(folder)

    def measure(self, budget: float = 3.0, give_up: bool = False) -> MachineProfile:
        self.times += 1
        autocast = torch.is_autocast_enabled("cpu")
        self.seen.append((torch.get_num_threads(), torch.is_grad_enabled(), autocast))
        if self.error is not None:
            raise self.error
        return MachineProfile(
            measuring.conditions(), RATES, busy=self.busy, seconds=budget, date=str(self.times)
        )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    stand_in = Measured()
    monkeypatch.setattr(measuring, "measure", stand_in.measure)
    monkeypatch.setattr(measuring, "glance", lambda: stand_in.glances)
    monkeypatch.setattr(candidates, "get_ready", stand_in.get_ready)
    calibration.forget()
    yield stand_in
    calibration.forget()


def settings(folder: Path, calibration: str = "auto", threads: int | None = None) -> Settings:
    return Settings(cache_dir=str(folder), calibration=calibration, threads=threads)


def read(path: Path) -> MachineProfile:
    return MachineProfile.from_dict(json.loads(path.read_text()))


# --- when it measures -----------------------------------------------------------------------------


def test_auto_measures_once_and_the_next_process_reads_it(
    measured: Measured, tmp_path: Path
) -> None:
    mine = settings(tmp_path / "new" / "folder")
    first = current(mine, auto=True)
    assert first is not None
    assert current(mine, auto=True) is first
    calibration.forget()  # as a new process
    answer = find(mine, auto=True)
    assert (answer.profile, measured.times) == (first, 1)
    assert answer.path == path_of(mine.cache_folder, first.conditions)
    assert read(answer.path) == first


def test_kernels_are_built_before_and_only_if_something_is_measured(
    measured: Measured, tmp_path: Path
) -> None:
    current(settings(tmp_path, "off"), auto=True)
    assert measured.ready == []
    current(settings(tmp_path), auto=True)
    calibrate(settings=settings(tmp_path))
    assert (measured.ready, measured.times) == ([tmp_path, tmp_path], 2)


def test_nothing_is_measured_unless_both_ask_for_it(measured: Measured, tmp_path: Path) -> None:
    assert current(settings(tmp_path, "off"), auto=True) is None
    assert current(settings(tmp_path, "auto")) is None
    assert find(settings(tmp_path)).note == "no profile is stored"
    assert measured.times == 0
    calibrate(settings=settings(tmp_path))
    assert current(settings(tmp_path, "off")) is not None


def test_a_profile_that_comes_later_is_seen(measured: Measured, tmp_path: Path) -> None:
    """Another process stores one while this one has none."""
    mine = settings(tmp_path, "off")
    assert current(mine) is None
    conditions = measuring.conditions()
    profile = MachineProfile(conditions, RATES)
    path_of(tmp_path, conditions).write_text(json.dumps(profile.as_dict()))
    assert current(mine) == profile


def test_the_setting_of_the_environment_counts(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_CACHE_DIR", str(tmp_path))
    assert current(auto=True) is None  # the suite switches it off
    monkeypatch.setenv("UNIFIED_CALIBRATION", "auto")
    assert current(auto=True) is not None
    assert list(tmp_path.glob("profile-*.json"))


def test_calibrate_measures_whatever_is_stored(measured: Measured, tmp_path: Path) -> None:
    calibrate(settings=settings(tmp_path))
    answer = calibrate(1.5, settings(tmp_path))
    assert answer.profile is not None
    assert (answer.profile.date, answer.profile.seconds) == ("2", 1.5)
    assert current(settings(tmp_path)) == answer.profile


def test_threads_in_one_process_measure_once(measured: Measured, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: current(settings(tmp_path), auto=True), range(16)))
    assert measured.times == 1
    assert len({id(one) for one in found}) == 1


def test_a_thread_count_of_its_own(measured: Measured, tmp_path: Path) -> None:
    """Measured with the threads that graphs will have; another count has another profile."""
    before = torch.get_num_threads()
    more = before + 1
    found = current(settings(tmp_path, threads=more), auto=True)
    assert found is not None
    assert found.conditions.threads == more
    assert current(settings(tmp_path, "off")) is None
    assert measured.seen[0][0] == more
    assert torch.get_num_threads() == before
    assert calibration.others(tmp_path, measuring.conditions()) == [found]


def test_the_state_of_the_caller_is_not_in_force(measured: Measured, tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        current(settings(tmp_path), auto=True)
    assert measured.seen == [(torch.get_num_threads(), True, False)]


def test_a_busy_machine_is_not_measured(measured: Measured, tmp_path: Path) -> None:
    measured.glances = 0.5
    answer = find(settings(tmp_path), auto=True)
    assert answer.profile is None
    assert "other processes take 50%" in answer.note
    assert "python -m kernel_dispatch calibrate" in answer.note
    assert measured.times == 0


def test_a_machine_that_becomes_busy_is_measured_once_and_not_kept(
    measured: Measured, tmp_path: Path
) -> None:
    measured.busy = 0.4
    for _ in range(3):
        assert current(settings(tmp_path), auto=True) is None
    assert measured.times == 1
    assert not list(tmp_path.glob("*.json"))
    assert calibrate(settings=settings(tmp_path)).path is not None  # who asks for it gets it


def test_a_busy_moment_does_not_replace_a_better_profile(
    measured: Measured, tmp_path: Path
) -> None:
    mine = settings(tmp_path)
    measured.busy = 0.5
    assert calibrate(settings=mine).path is not None  # better than none, if somebody asks for it
    measured.busy = 0.0
    good = calibrate(settings=mine)
    measured.busy = 0.5
    answer = calibrate(settings=mine)
    assert (answer.path, answer.note) == (None, "not stored: the profile of 2 is better")
    assert current(mine) == good.profile


def test_a_failure_is_a_note_and_is_not_repeated(measured: Measured, tmp_path: Path) -> None:
    measured.error = MemoryError("too much")
    for _ in range(3):
        assert find(settings(tmp_path), auto=True).note == "measuring failed: MemoryError: too much"
    assert measured.times == 1


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "\x00", '{"schema": 0}', "[]"])
def test_a_broken_file_is_ignored_and_replaced(
    measured: Measured, tmp_path: Path, text: str
) -> None:
    path = path_of(tmp_path, measuring.conditions())
    path.write_text(text)
    note = find(settings(tmp_path, "off"), auto=True).note
    assert note.startswith(f"{path} is not used: it is no machine profile")
    found = current(settings(tmp_path), auto=True)
    assert found == read(path)


def test_a_file_that_is_not_text_or_not_a_file(measured: Measured, tmp_path: Path) -> None:
    path = path_of(tmp_path, measuring.conditions())
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not used" in find(settings(tmp_path, "off")).note
    path.unlink()
    path.mkdir()
    assert "is not used" in find(settings(tmp_path, "off")).note
    answer = find(settings(tmp_path), auto=True)
    assert answer.profile is not None
    assert "could not be stored" in answer.note
    assert [one.name for one in tmp_path.glob("*.tmp")] == []


def test_a_profile_of_another_machine_under_our_name(measured: Measured, tmp_path: Path) -> None:
    ours = measuring.conditions()
    other = dataclasses.replace(ours, cpu="another CPU", torch="2.0")
    text = json.dumps(MachineProfile(other, RATES).as_dict())
    path_of(tmp_path, ours).write_text(text)
    note = find(settings(tmp_path, "off")).note
    assert "it was measured on another CPU and with torch 2.0" in note


def test_where_nothing_can_be_written_it_is_measured_once(
    measured: Measured, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    mine = settings(tmp_path / "file" / "folder")
    for _ in range(3):
        answer = find(mine, auto=True)
        assert answer.profile is not None
        assert answer.path is None
        assert "it could not be stored" in answer.note
    assert measured.times == 1


def test_many_writers_leave_one_whole_file(measured: Measured, tmp_path: Path) -> None:
    """A reader beside them sees the old profile or the new one."""
    conditions, done = measuring.conditions(), threading.Event()
    notes = []

    def write(number: int) -> None:
        for i in range(20):
            profile = MachineProfile(conditions, RATES, date=f"{number} {i}", notes=("x" * 5000,))
            assert calibration._stored(tmp_path, profile).path is not None

    def watch() -> None:
        while not done.is_set():
            notes.append(calibration.read(tmp_path, conditions).note)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    done.set()
    watcher.join()
    assert set(notes) <= {"", "no profile is stored"}
    assert [one.suffix for one in tmp_path.iterdir()] == [".json"]


def test_who_waits_for_another_process_takes_its_profile(
    measured: Measured, tmp_path: Path
) -> None:
    """The other one is played by a thread that holds the lock of the file."""
    from filelock import FileLock

    conditions = measuring.conditions()
    path, held = path_of(tmp_path, conditions), threading.Event()

    def other() -> None:
        with FileLock(str(path.with_suffix(".lock"))):
            held.set()
            time.sleep(0.2)
            path.write_text(json.dumps(MachineProfile(conditions, RATES, date="other").as_dict()))

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    found = current(settings(tmp_path), auto=True)
    thread.join()
    assert found is not None
    assert (found.date, measured.times) == ("other", 0)


def test_who_has_waited_long_enough_goes_on_without(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    monkeypatch.setattr(calibration, "BUDGET_S", 0.05)
    monkeypatch.setattr(calibration, "_PATIENCE_S", 0.05)
    path = path_of(tmp_path, measuring.conditions())
    with FileLock(str(path.with_suffix(".lock"))):
        answer = find(settings(tmp_path), auto=True)
    assert answer.profile is None
    assert answer.note == "another process is measuring"
    assert measured.times == 0


def test_reset_deletes_this_machines_profile_only(measured: Measured, tmp_path: Path) -> None:
    mine = settings(tmp_path)
    calibrate(settings=mine)
    other = tmp_path / "profile-of-another-machine.json"
    other.write_text("{}")
    assert calibration.reset(mine)
    assert not calibration.reset(mine)
    assert current(mine) is None
    assert other.exists()


# --- jobs and settings ----------------------------------------------------------------------------


def test_under_torchrun_nothing_is_measured_before_the_group_is_there(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor read: ranks on several machines have different files. See tests/distributed."""
    calibrate(settings=settings(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = find(settings(tmp_path), auto=True)
    assert answer.profile is None
    assert "distributed job is not timed" in answer.note
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current(settings(tmp_path), auto=True) is not None
    assert measured.times == 1


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernel_dispatch.settings import default_cache_folder as folder

    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert folder({"XDG_CACHE_HOME": "/xdg"}, "linux") == Path("/xdg/kernel_dispatch")
    assert folder({"XDG_CACHE_HOME": "relative"}, "linux") == Path(
        "/home/me/.cache/kernel_dispatch"
    )
    assert folder({}, "darwin") == Path("/home/me/Library/Caches/kernel_dispatch")
    windows = folder({"LOCALAPPDATA": "/data"}, "win32")
    assert windows == Path("/data/kernel_dispatch/Cache")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert folder({}, "linux").name.startswith("kernel_dispatch-")


def test_the_two_settings_are_checked(tmp_path: Path) -> None:
    from kernel_dispatch.settings import configure, resolve

    file = tmp_path / "file"
    file.write_text("")
    for bad in ("", "  ", 7, "a\0b", str(file)):
        with pytest.raises(SettingError, match="cache_dir="):
            resolve(options={"cache_dir": bad})
    with pytest.raises(SettingError, match=r"unknown calibration 'of'.*'off'"):
        resolve(environ={"UNIFIED_CALIBRATION": "of"})
    assert resolve(options={"cache_dir": tmp_path}).cache_folder == tmp_path
    assert resolve(environ={"UNIFIED_CACHE_DIR": "~/x"}).cache_folder == Path.home() / "x"
    with configure(cache_dir="some/where", calibration="OFF"):
        found = resolve()
    assert found.cache_folder == Path.cwd() / "some/where"
    assert found.calibration == "off"


def test_this_machine_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the libraries of torch; kernels that have to be built are not for the quick tests."""
    monkeypatch.setattr(measuring, "CANDIDATES", of_torch())
    monkeypatch.setattr(candidates, "get_ready", lambda folder: None)
    answer = calibrate(0.2, settings(tmp_path))
    calibration.forget()
    assert answer.profile is not None
    assert answer.path is not None
    assert current(settings(tmp_path)) == answer.profile == read(answer.path)
