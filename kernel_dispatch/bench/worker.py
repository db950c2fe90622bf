"""The process of one contender: builds cases, verifies, warms up, and is timed call by call.

The parent (`client.py`) writes one JSON object per line and reads one back. Everything that the
timed code prints goes to stderr, so it cannot get in between.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kernel_dispatch.bench import catalogue, contenders, limits, roofline
from kernel_dispatch.bench.building import build
from kernel_dispatch.bench.checking import Bound, Truth, WrongResult, check, establish
from kernel_dispatch.bench.compiling import Compiles, Recompiled
from kernel_dispatch.bench.contender import ContenderWarning
from kernel_dispatch.bench.device import PeakMemory, give_back_memory, synchronize
from kernel_dispatch.bench.stepping import Step
from kernel_dispatch.bench.workload import Case
from kernel_dispatch.user_code import UsageError, UserCodeError, named
from lowering.errors import SettingError, UnifiedWarning

Reply = dict[str, Any]

# Once two calls in a row compiled nothing it is warm; a case that compiles in more than this many
# calls is not going to stop, or only because Dynamo gives up.
_COMPILING_CALLS = 4
_SAMPLE_S = 0.002  # a sample repeats short calls until it lasts this long: clocks are coarse
_LONG_CALL_S = 0.3  # calls longer than this need none before them to fill caches and wake threads


class Worker:
    def __init__(self, name: str) -> None:
        self._contender = contenders.find(name, catalogue.peers())
        self._step: Step | None = None
        self._timed: Step | None = None
        self._truth: Truth | None = None
        self._device = "cpu"
        self._memory: PeakMemory | None = None
        self._compiles = Compiles(self._contender.compiles_with_dynamo)
        self._call_s = 0.0
        self._before_timing = 0

    def hello(self, threads: int | None, device: str) -> Reply:
        """Who this is; imports the compiler and wakes it up, which no workload should pay for."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = device
        missing = self._contender.missing()
        if not missing:
            self._wake_up()
        return {
            "missing": missing,
            "version": "" if missing else self._contender.version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def find(self, target: str) -> Reply:
        """Is there such a function? A typo is told before anything is measured."""
        named(target)
        return {}

    def limits(self, dtype: str) -> Reply:
        return vars(limits.measure(getattr(torch, dtype), self._device))

    def build(self, target: str, seed: int, dtype: str | None, training: bool) -> Reply:
        if training and not self._contender.trains:
            raise RuntimeError(f"{self._contender.name} does not train")
        self._memory = PeakMemory(self._device)
        built = build(catalogue.workload(target), seed, dtype, self._device, training)
        self._step = built.step
        return {"fingerprint": built.fingerprint, "dtype": built.dtype, "group": built.group}

    def establish(self, path: str) -> Reply:
        """For the baseline: the outputs that all others are compared with."""
        step = self._need(self._step)
        truth = establish(step)
        truth.save(path)
        flops, moved = roofline.count(step)
        return {"note": truth.note, "flops": flops, "bytes": moved}

    def prepare(self) -> Reply:
        step = self._need(self._step)
        start = time.perf_counter()
        self._timed = step.with_fn(self._contender.prepare(step.case))
        return {"seconds": time.perf_counter() - start}

    def first_call(self, path: str) -> Reply:
        """Compile, run once and verify. `path`: where the truth is."""
        timed = self._need(self._timed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ContenderWarning)
            warnings.simplefilter("always", UnifiedWarning)
            start = time.perf_counter()
            outputs = timed.run()
            synchronize(self._device)
            seconds = time.perf_counter() - start
        reply: Reply = {"seconds": seconds, "note": _notes(caught)}
        self._truth = Truth.load(path)
        found = check(outputs, self._truth, self._bound())
        return {**reply, "numerics": vars(found) if found is not None else None}

    def warm_up(self) -> Reply:
        """Call until nothing compiles any more; then how long a call takes."""
        timed, quiet, compiling = self._need(self._timed), 0, 0
        self._call_s = math.inf
        while quiet < 2:
            before = self._compiles.count()
            start = time.perf_counter()
            timed.run()
            synchronize(self._device)
            seconds = time.perf_counter() - start
            compiled = self._compiles.count() > before
            # The fastest quiet one: what the machine did in the other was not this call.
            self._call_s = math.inf if compiled else min(self._call_s, seconds)
            quiet, compiling = (0, compiling + 1) if compiled else (quiet + 1, compiling)
            if compiling > _COMPILING_CALLS:
                raise Recompiled(
                    f"compiled again in {compiling} calls of the same case while it warmed up"
                    f"{self._compiles.reason()}"
                )
        self._before_timing = self._compiles.count()
        calls = max(1, math.ceil(_SAMPLE_S / max(self._call_s, 1e-7)))
        return {"seconds": self._call_s, "calls": calls, "recompiles": compiling}

    def call(self) -> None:
        """What is timed: one step, until the device is done."""
        self._need(self._timed).run()
        synchronize(self._device)

    def time(self, calls: int) -> Reply:
        run, device = self._need(self._timed).run, self._device
        self._before_timing = self._compiles.count()
        if self._call_s < _LONG_CALL_S:
            run()  # another process had the caches in between
        gc.collect(0)
        gc.disable()
        try:
            start = time.perf_counter()
            for _ in range(calls):
                run()
                synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
        self.demand_quiet()
        return {"seconds": seconds / calls}

    def demand_quiet(self) -> None:
        """Nothing compiled since it was warm."""
        if self._compiles.count() > self._before_timing:
            raise Recompiled(f"compiled again while it was timed{self._compiles.reason()}")

    def finish(self) -> Reply:
        """What was seen until now; the output once more, where calls can be compared."""
        timed, truth = self._need(self._timed), self._truth
        if truth is not None and truth.repeatable:
            check(timed.run(), truth, self._bound())
        memory = self._memory.bytes() if self._memory is not None else None
        return {"peak_memory_bytes": memory, **self._compiles.summary(timed.fn)}

    def drop(self) -> Reply:
        self._step = self._timed = self._truth = self._memory = None
        self._compiles.forget()
        give_back_memory()
        return {}

    def _bound(self) -> Bound:
        return Bound(self._contender.error_factor, self._contender.tolerance)

    def _wake_up(self) -> None:
        """A case that every contender takes; what it says about it is none of our business."""
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
        case = Case(model.to(self._device), (torch.zeros(8, 64, device=self._device),))
        try:
            Step(case, False, self._contender.prepare(case)).run()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        self.drop()

    @staticmethod
    def _need(step: Step | None) -> Step:
        assert step is not None, "the parent sends build and prepare first"
        return step


def answer(worker: Worker, request: Reply) -> Reply:
    try:
        command: Callable[..., Reply] = getattr(worker, request.pop("do"))
        return {"status": "ok", **command(**request)}
    except Exception as error:  # noqa: BLE001  (a contender may raise anything: it becomes a row)
        traceback.print_exc()
        return {"status": _status(error), "reason": one_line(error)}


def _status(error: Exception) -> str:
    if isinstance(error, WrongResult):
        return "wrong"
    if isinstance(error, Recompiled):
        return "recompiled"
    return "usage" if isinstance(error, (UsageError, SettingError)) else "failed"


def _notes(caught: list[warnings.WarningMessage]) -> str:
    """What the contender itself says about its row; the rest goes where warnings go."""
    ours = (ContenderWarning, UnifiedWarning)
    for other in caught:
        if not issubclass(other.category, ours):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    texts = [str(one.message) for one in caught if issubclass(one.category, ours)]
    return "; ".join(" ".join(text.split())[:300] for text in dict.fromkeys(texts))


def one_line(error: BaseException) -> str:
    """The first lines of an error; torch's are long, and the rest is advice about flags."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        return f"{error}: {one_line(error.__cause__)}"
    text = " ".join(str(error).split())
    shown = text if len(text) <= 400 else text[:400] + " ..."
    name = type(error).__name__
    return (
        shown if isinstance(error, (WrongResult, Recompiled)) else f"{name}: {shown}".rstrip(": ")
    )


def main() -> None:
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed, by Python or by a library, goes to stderr
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # and nobody else reads our requests
    sys.stdout, sys.stdin = sys.stderr, open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    worker: Worker | None = None
    for line in requests:
        request = json.loads(line)
        contender = request.pop("contender")
        if worker is None:
            try:
                worker = Worker(contender)
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                print(json.dumps({"status": "failed", "reason": one_line(error)}), file=answers)
                return
        print(json.dumps(answer(worker, request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
