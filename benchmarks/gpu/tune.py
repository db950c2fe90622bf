"""`tune`: times the candidates of every launch at the usual shapes, and keeps the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import checking
from benchmarks.gpu.case import EIGHT_BITS, Case, Shape, dtype_of, kernel
from benchmarks.gpu.cases import ALL
from benchmarks.gpu.kernels import call_of
from benchmarks.gpu.results import WRONG, Job, Row
from benchmarks.gpu.settings import CPU_NOTE, Settings
from benchmarks.gpu.timing import clock, milliseconds
from triton_kernels import architectures, tuning


def jobs(settings: Settings) -> list[Job]:
    """The first shape of every case first, as in `kernels`."""
    found = [pair for case in ALL for pair in _of_case(settings, case)]
    found.sort(key=lambda pair: pair[0])
    return [job for _, job in found]


def _of_case(settings: Settings, case: Case) -> Iterator[tuple[int, Job]]:
    shapes = (case.tiny,) if settings.quick else case.shapes
    wanted = settings.dtypes or ("bfloat16", *EIGHT_BITS)
    known = case.dtypes_on(settings.device)
    dtypes = [name for name in known if name in wanted] or known[:1] * (not settings.measures)
    for number, shape in enumerate(shapes):
        for dtype in dtypes:
            for direction in case.directions:
                key = f"tune/{case.name}/{direction}/{dtype}/{'x'.join(map(str, shape))}"
                run = partial(_tune, settings, case, shape, dtype, direction)
                yield number, Job(key, run)


def _tune(settings: Settings, case: Case, shape: Shape, dtype: str, direction: str) -> Row:
    kernel(case.kernel)
    device = torch.device(settings.device)
    if not settings.measures:  # times of the interpreter must never decide what a GPU is given
        tuning.keep_in(None)
    torch.manual_seed(0)
    inputs = case.make(shape, dtype_of(dtype, settings.device), settings.device)
    watch = clock(settings.device, settings.quick)
    with watch.here():
        call = call_of(case.ours, inputs, direction)
    own = checking.of_direction(case.own, inputs, direction)
    times: list[float] = []

    def timed(run: object) -> float:
        """A candidate that is wrong on this card must not be the one that is kept."""
        got = checking.of_direction(case.ours, inputs, direction)
        if not checking.is_near(case.view(got), case.view(own)):
            wrong.append(len(times))
            raise RuntimeError("this candidate computes something else")
        times.append(milliseconds(watch, call))
        return times[-1]

    wrong: list[int] = []
    chosen = tuning.tune(call, architectures.of(device), timed)
    if not settings.measures:
        return {"remark": CPU_NOTE, "choices": len(chosen)}
    found: Row = {"chosen": chosen, "milliseconds": times}
    if wrong:
        return {"status": WRONG, "reason": f"{len(wrong)} candidates are wrong", **found}
    return {"remark": f"{len(times)} candidates, {_gain(times):.2f}x", **found}


def _gain(times: list[float]) -> float:
    """Of the fastest over the first, which is what is taken where nothing was tuned."""
    return times[0] / min(times) if times else 1.0
