"""Which machine profile holds here: where it is kept, when it is measured, what a job agrees on.

A profile lies in the cache folder under the fingerprint of its conditions (CPU, torch, threads,
kernels), so one that was measured under others is never read. `current()` answers from there;
with `auto` it measures once where there is none. Nothing here raises: without a profile, providers
are ranked by `lowering.prior`.

In a distributed job no rank measures: ranks that time for themselves choose differently. Rank 0's
stored profile counts for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from kernel_dispatch.calibrate_command import COMMAND
from kernel_dispatch.settings import Settings, resolve
from kernel_dispatch.thread_count import with_threads
from lowering import candidates, measuring
from lowering.measuring import BUDGET_S
from lowering.profile import MOST_BUSY, Conditions, MachineProfile, from_text

T = TypeVar("T")

_JOB_KEY = "kernel_dispatch/machine_profile"
_RANK_0_S = 5.0  # how long the other ranks wait for rank 0's answer
_NO_PROFILE = "none"
_PATIENCE_S = 2.0  # for another process that measures, beyond its budget


@dataclass(frozen=True)
class Answer:
    """A profile and the file that holds it; or none, and why."""

    profile: MachineProfile | None = None
    path: Path | None = None
    note: str = ""


_lock = threading.Lock()
_known: dict[tuple[Path, Conditions], Answer] = {}  # read, measured, or measured in vain
_agreed: dict[int, Answer] = {}  # threads -> what this process's job uses


def _renew_lock() -> None:
    """A child forked while another thread measures would wait for that thread for ever."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def current(settings: Settings | None = None, *, auto: bool = False) -> MachineProfile | None:
    """The profile that holds for this process now. May measure only if `auto` and the setting
    `calibration` both say so: at most once per process, for some 3 seconds."""
    return find(settings, auto=auto).profile


def find(settings: Settings | None = None, *, auto: bool = False) -> Answer:
    """As `current`, with the file that it is from or the reason why there is none."""
    settings = resolve() if settings is None else settings
    wanted, folder = measuring.conditions(settings.threads), settings.cache_folder
    with _lock:
        if _job_to_come():
            return Answer(note=_TOO_EARLY)  # not kept: the group will be there later
        if _in_a_job():
            if wanted.threads not in _agreed:
                _agreed[wanted.threads] = _agree(wanted, folder)
            return _agreed[wanted.threads]
        key = (folder, wanted)
        if key not in _known:
            answer = read(folder, wanted)
            if answer.profile is None and auto and settings.calibration == "auto":
                answer = _measure_in_turn(folder, wanted)
            elif answer.profile is None:
                return answer  # not kept: another process may store one
            _known[key] = answer
        return _known[key]


def calibrate(budget: float = BUDGET_S, settings: Settings | None = None) -> Answer:
    """Measure now, whatever is stored, and store the result; a failure to store is a note. So is a
    busy machine, where a better profile is stored already."""
    settings = resolve() if settings is None else settings
    wanted, folder = measuring.conditions(settings.threads), settings.cache_folder
    candidates.get_ready(folder)
    with _lock, _turn(folder, wanted, budget):
        profile = _aside(wanted.threads, lambda: measuring.measure(budget))
        before = read(folder, wanted).profile
        if profile.disturbed and before is not None and not before.disturbed:
            return Answer(profile, note=f"not stored: the profile of {before.date} is better")
        answer = _stored(folder, replace(profile, conditions=wanted))
        _known[folder, wanted] = answer
        return answer


def forget() -> None:
    """Drop what this process knows; files stay. For tests: `auto` may then measure once more."""
    with _lock:
        _known.clear()
        _agreed.clear()


def reset(settings: Settings | None = None) -> bool:
    """Delete the stored profile of this machine; False where there was none to delete."""
    settings = resolve() if settings is None else settings
    forget()
    try:
        path_of(settings.cache_folder, measuring.conditions(settings.threads)).unlink()
    except OSError:
        return False
    return True


# --- files ----------------------------------------------------------------------------------------


def path_of(folder: Path, wanted: Conditions) -> Path:
    return folder / f"profile-{wanted.fingerprint()}.json"


def read(folder: Path, wanted: Conditions) -> Answer:
    path = path_of(folder, wanted)
    profile, why = _load(path)
    if profile is not None and profile.conditions != wanted:  # copied, or edited by hand
        why = f"it was measured {' and '.join(profile.conditions.differences(wanted))}"
        profile = None
    if profile is not None:
        return Answer(profile, path)
    return Answer(note=f"{path} is not used: {why}" if why else "no profile is stored")


def others(folder: Path, wanted: Conditions) -> list[MachineProfile]:
    """What was measured under other conditions, and so does not hold now."""
    found = [_load(path)[0] for path in sorted(folder.glob("profile-*.json"))]
    return [one for one in found if one is not None and one.conditions != wanted]


def _load(path: Path) -> tuple[MachineProfile | None, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    return from_text(text)


def _stored(folder: Path, profile: MachineProfile) -> Answer:
    """Written beside it first: a reader sees the old file or the new one, never a part."""
    path = path_of(folder, profile.conditions)
    draft = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(profile.as_dict(), indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        return Answer(profile, note=f"it could not be stored: {error}")
    return Answer(profile, path)


# --- measuring ------------------------------------------------------------------------------------


def _measure_in_turn(folder: Path, wanted: Conditions) -> Answer:
    """Processes that start together must not measure together: they would time each other."""
    try:
        candidates.get_ready(folder)
        with _turn(folder, wanted, BUDGET_S) as mine:
            answer = read(folder, wanted)
            if answer.profile is not None:
                return answer
            if not mine:
                return Answer(note="another process is measuring")
            return _aside(wanted.threads, lambda: _measure(folder, wanted))
    except Exception as error:  # noqa: BLE001  (a prior does as well; the user's graph must run)
        return Answer(note=f"measuring failed: {type(error).__name__}: {error}")


def _measure(folder: Path, wanted: Conditions) -> Answer:
    busy = measuring.glance()
    if busy <= MOST_BUSY:
        profile = measuring.measure(BUDGET_S, give_up=True)
        if not profile.disturbed:
            return _stored(folder, replace(profile, conditions=wanted))
        busy = profile.busy
    # Kept, it would mislead every later process; the next one tries again.
    return Answer(note=f"other processes take {busy:.0%} of this one's time; when idle: {COMMAND}")


@contextlib.contextmanager
def _turn(folder: Path, wanted: Conditions, budget: float) -> Iterator[bool]:
    """True: it is our turn, or turns cannot be taken here; False: another one took too long."""
    from filelock import FileLock, Timeout  # a dependency of torch

    lock = FileLock(str(path_of(folder, wanted).with_suffix(".lock")))
    mine = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=budget + _PATIENCE_S)
    except Timeout:
        mine = False
    except (OSError, NotImplementedError):  # cannot be written, or has no locks
        pass
    try:
        yield mine
    finally:
        lock.release()


def _aside(threads: int, run: Callable[[], T]) -> T:
    """In a thread of its own, where no mode, autocast or grad setting of the caller is in force."""
    with ThreadPoolExecutor(1) as pool:
        done: T = pool.submit(with_threads(run, threads)).result()
    return done


# --- distributed jobs -----------------------------------------------------------------------------


def _in_a_job() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _job_to_come() -> bool:
    """torchrun started several of us, and the process group is not there yet."""
    if not dist.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return False
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1


_TOO_EARLY = "a distributed job is not timed, and its process group is not there yet"
_RANK_0S = "rank 0's stored profile, as on every rank"


def _agree(wanted: Conditions, folder: Path) -> Answer:
    """What every rank of the job uses, whoever asks first and whatever is late."""
    try:
        told, rank = _exchanged(wanted, folder), dist.get_rank()
    except Exception as error:  # noqa: BLE001  (stores raise what they like)
        return Answer(note=f"rank 0's profile cannot be asked for: {type(error).__name__}: {error}")
    if told == _NO_PROFILE:
        return Answer(
            note=f"a distributed job is not timed, and rank 0 has no profile stored, or was more "
            f"than {_RANK_0_S:.0f} s late; before the job: {COMMAND}"
        )
    profile, why = from_text(told)
    path = path_of(folder, wanted) if rank == 0 and profile else None
    return Answer(profile, path, f"rank 0's profile is not used: {why}" if why else _RANK_0S)


def _exchanged(wanted: Conditions, folder: Path) -> str:
    """Rank 0 writes what it has stored. A rank that has waited too long writes that there is
    nothing. The store takes the first of these only, so that all read the same."""
    store: Any = dist.distributed_c10d._get_default_store()
    key, mine = f"{_JOB_KEY}/{wanted.threads}", _NO_PROFILE
    if dist.get_rank() == 0:
        if (profile := read(folder, wanted).profile) is not None:
            mine = json.dumps(profile.as_dict())
    else:
        deadline = time.monotonic() + _RANK_0_S
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.02)
    told: bytes = store.compare_set(key, "", mine)
    return told.decode()
