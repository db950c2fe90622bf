"""A call of the script: one process that works through the rows, and one that watches it.

A kernel can take its process with it (an illegal address, an endless loop). The watching process
turns the row that was running into a failed one and starts another process, which goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.gpu.case import Absent
from benchmarks.gpu.results import ABSENT, FAILED, OK, RUNNING, Job, Results, surroundings
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import Clock
from kernel_dispatch.terminal import write

BROKEN = 75  # the exit code of a process that no further row should run in
# For the worker: when the call ends, in seconds of time.time(), and when it began, which names it.
_UNTIL, _CALL = "GPU_BENCHMARK_UNTIL", "GPU_BENCHMARK_CALL"


def watch(settings: Settings, arguments: Sequence[str]) -> int:
    """Start workers until one of them comes to the end of the rows, or of the time."""
    until = time.time() + settings.seconds
    environment = _environment(settings, until)
    _forget_unfinished(Results(settings.json))
    while True:
        code = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *arguments, "--worker"],
            env=environment,
            check=False,
        ).returncode
        results = Results(settings.json)
        stuck = results.running()
        if stuck is not None:
            _settle(results, stuck, code, until)
        elif code != BROKEN:
            return code
        if time.time() >= until:
            return 0


def _forget_unfinished(results: Results) -> None:
    """Somebody ended an earlier call, both of its processes: nobody said what became of the row."""
    stuck = results.running()
    if stuck is not None:
        results.remove(stuck["key"])


def _environment(settings: Settings, until: float) -> dict[str, str]:
    """Without a GPU, kernels are interpreted; with one, they must not be."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    environment = {**os.environ, _UNTIL: str(until), _CALL: now}
    if settings.tuned is not None:  # `unified` looks there too
        environment["UNIFIED_CACHE_DIR"] = str(settings.tuned.absolute())
    environment.pop("TRITON_INTERPRET", None)
    if settings.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _settle(results: Results, row: dict[str, Any], code: int, until: float) -> None:
    if code == -signal.SIGALRM and time.time() >= until:
        results.remove(row["key"])  # cut off by the end of the call: the next one begins with it
        return
    reason = f"its process ended with code {code}"
    if code == -signal.SIGALRM:
        reason = f"it took longer than --row-seconds ({row['limit']:.0f})"
    results.put(row["key"], FAILED, reason=reason)
    write(f"{FAILED:8} {row['key']}: {reason}")


# --- in the worker --------------------------------------------------------------------------------


def work(settings: Settings, jobs: Sequence[Job], arguments: Sequence[str]) -> int:
    """The card is asked here and not in the process that watches: there may be cards that one
    process at a time can use."""
    results = Results(settings.json)
    started = os.environ.get(_CALL, "")
    if not started or results.last_call() != started:
        results.begin_run({"started": started, **surroundings(settings.device, list(arguments))})
    until = float(os.environ.get(_UNTIL, time.time() + settings.seconds))
    for number, job in enumerate(jobs, 1):
        if results.get(job.key) is not None:
            continue
        if time.time() >= until:
            break
        row = _run(settings, results, job, until)
        write(f"{row['status']:8} {number}/{len(jobs)} {job.key} {_remark(row)}".rstrip())
        sys.stdout.flush()
        if Clock.spoilt or (row["status"] != OK and _is_lost(settings.device)):
            return BROKEN
    return 0


def _run(settings: Settings, results: Results, job: Job, until: float) -> dict[str, Any]:
    limit = min(settings.row_seconds, max(1.0, until - time.time()))
    results.put(job.key, RUNNING, limit=limit)
    # Without a handler the signal ends the process, wherever it hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit)
    start = time.perf_counter()
    try:
        found = {"status": OK, **job.run()}
    except Absent as absent:
        found = {"status": ABSENT, "reason": str(absent)}
    except Exception as error:  # noqa: BLE001  (whatever happens in a row is a row)
        traceback.print_exc()
        found = {"status": FAILED, "reason": one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    status = found.pop("status")
    results.put(job.key, status, seconds=round(time.perf_counter() - start, 2), **found)
    _tidy(settings.device)
    return results.get(job.key) or {}


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}".rstrip(": ")


def _remark(row: dict[str, Any]) -> str:
    return row.get("reason") or row.get("remark") or ""


def _tidy(device: str) -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if device != "cpu" and not _is_lost(device):
        import gc

        gc.collect()
        torch.cuda.empty_cache()


def _is_lost(device: str) -> bool:
    """After an illegal address every further call fails, in this process only."""
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001
        return True
    return False
