"""Runs cases in worker processes, so that an op that hangs or crashes costs one row."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.compiling import size_limits_lifted
from tests.sweep.check import Result, run_case
from tests.sweep.samples import Case

START_SECONDS = 120.0
RECYCLE_AFTER = 400  # tasks: compiled code is never unloaded, so a worker grows


@dataclass(frozen=True)
class Task:
    case: Case
    direction: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    backend: str
    samples: int
    seconds: float  # per op, direction and level
    shipped_limits: bool = False  # leave tiny graphs to eager, as the product does


def run_tasks(
    tasks: Iterable[Task], settings: Settings, jobs: int, record: Callable[[Result], None]
) -> None:
    """Run every task on `jobs` workers; `record` is called under a lock, once per result."""
    queue = deque(tasks)
    lock = threading.Lock()
    threads = [
        threading.Thread(target=_drive, args=(queue, settings, record, lock)) for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drive(
    queue: deque[Task], settings: Settings, record: Callable[[Result], None], lock: threading.Lock
) -> None:
    worker, served = _Worker(settings), 0
    while True:
        with lock:
            if not queue:
                break
            task = queue.popleft()
        served += 1
        for result in worker.run(task):
            with lock:
                record(result)
                rest = task.levels[task.levels.index(result.level) + 1 :]
                if rest and result.status in ("timeout", "crash"):
                    queue.appendleft(Task(task.case, task.direction, rest))
        if not worker.alive or served % RECYCLE_AFTER == 0:
            worker.stop()
            worker = _Worker(settings)
    worker.stop()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end, settings), daemon=True)
        self.process.start()
        far_end.close()
        self.alive = self._receive(START_SECONDS)[0] == "ready"
        if not self.alive:
            self.stop()
            raise RuntimeError("a sweep worker did not start")

    def run(self, task: Task) -> Iterable[Result]:
        self.pipe.send(task)
        pending = deque(task.levels)
        while True:
            start = time.perf_counter()
            kind, payload = self._receive(self.settings.seconds)
            if kind == "done":
                return
            if kind == "result":
                pending.remove(payload.level)
                yield payload
                continue
            self.alive = False
            case = task.case
            yield Result(
                case.op, case.variant, case.dtype, task.direction, pending[0], kind, payload,
                seconds=round(time.perf_counter() - start, 1),
            )  # fmt: skip
            return

    def _receive(self, seconds: float) -> tuple[str, Any]:
        if not self.pipe.poll(seconds):
            return "timeout", f"no result within {seconds:.0f} s"
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join(5)
            return "crash", f"the process ended with code {self.process.exitcode}"

    def stop(self) -> None:
        if self.alive:
            self.pipe.send(None)
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, settings: Settings) -> None:
    """The worker: answers each task with its results, then with "done"."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)  # tiny tensors; and eager's own sums stay in one order
    keep = settings.shipped_limits or settings.backend != "unified"
    with nullcontext() if keep else size_limits_lifted():
        pipe.send(("ready", None))
        _answer(pipe, settings)


def _answer(pipe: Connection, settings: Settings) -> None:
    while True:
        task = pipe.recv()
        if task is None:
            return
        results = run_case(
            task.case, task.direction, task.levels,
            limit=settings.samples, backend=settings.backend,
        )  # fmt: skip
        for result in results:
            pipe.send(("result", result))
        pipe.send(("done", None))
