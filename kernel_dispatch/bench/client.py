"""The parent's end of a worker process: ask, wait no longer than agreed, say how it died."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_dispatch.bench.contender import Contender

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


# The requests of worker.py, as a reader of a result would call them.
_STEPS = {
    "hello": "starting",
    "find": "finding the workload",
    "limits": "measuring the machine",
    "build": "building the workload",
    "establish": "verifying",
    "prepare": "preparing",
    "first_call": "first call",
    "warm_up": "warming up",
    "time": "timing",
    "finish": "finishing",
    "drop": "cleaning up",
}


class Refusal(Exception):
    """The worker said no, or died. `status` is one of `results.STATUSES`, or "usage"."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Client:
    """One worker, started at its first request and, should it die, again for the next case."""

    def __init__(
        self, contender: Contender, hello: Mapping[str, Any], caches: str, timeout_s: float
    ) -> None:
        self.contender = contender
        self.about: dict[str, Any] = {}
        self._hello = dict(hello)
        self._caches = caches
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._log: Any = None
        self._said = 0

    @property
    def running(self) -> bool:
        return self._process is not None and not self.about.get("missing")

    def start(self) -> None:
        """Does nothing while it runs. Refusal "missing" if the contender is not there."""
        if self._process is None:
            self._spawn()
            self.about = self.ask("hello", **self._hello)
        if self.about["missing"]:
            raise Refusal("missing", self.about["missing"])

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None, "start() first"
        if what == "build":  # what it said before was about another workload
            self._said = os.fstat(self._log.fileno()).st_size
        request = {"do": what, "contender": self.contender.name, **arguments}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            self.stop()
            raise Refusal(
                "failed", f"{_STEPS[what]}: no answer within {self._timeout_s:.0f} s"
            ) from None
        if not line:
            raise Refusal("failed", f"{_STEPS[what]}: {self._how_it_died()}")
        reply: dict[str, Any] = json.loads(line)
        status = reply.pop("status")
        if status != "ok":
            raise Refusal(status, reply["reason"])
        return reply

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _spawn(self) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._answers, self._said = queue.Queue(), 0
        self._process = subprocess.Popen(
            [self.contender.python() or sys.executable, "-m", "kernel_dispatch.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment(),
            start_new_session=True,
        )
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        ).start()

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, **self.contender.environment}
        # Empty at the start, and nobody else's: or the first call would not be a cold one.
        environment["TORCHINDUCTOR_CACHE_DIR"] = self._caches
        environment["TRITON_CACHE_DIR"] = str(Path(self._caches) / "triton")
        if threads := self._hello.get("threads"):
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                environment[name] = str(threads)
        if self.contender.python():  # its own packages, and ours from this checkout
            environment["PYTHONPATH"] = _PACKAGE_ROOT
        return environment

    def _how_it_died(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        said = self._last_words()
        self.stop()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process died of {signal.Signals(-code).name}{said}"
        return f"the process left with exit code {code}{said}"

    def _last_words(self) -> str:
        self._log.seek(self._said)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"; its last words: {lines[-1][:300]}" if lines else ""


def _read(stream: Any, answers: queue.Queue[str]) -> None:
    """A thread of its own, since a pipe cannot be read with a time limit. Empty: it is gone."""
    for line in stream:
        answers.put(line)
    answers.put("")
