"""Time one's own model so that the numbers can be believed. Put your model into `make`.

1. Every contender is verified before it is timed: a wrong answer is not worth its speed.
2. Compilation and warm-up happen before the clock starts, and are shown on their own.
3. Rounds: in each, every contender runs once, in a fresh order. What slows the machine down for a
   while slows all of them down.
4. The median over the rounds, and the median of the ratios to eager *of the same round*.
5. The report says what ran. A speed-up of a model that fell back to eager is noise.

This is the short form, in one process. The command line starts processes for each contender, adds
intervals, memory and the cost of a restart, and draws a page:

    python -m kernel_dispatch bench examples/time_your_model.py:make --levels O1,O2
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import kernel_dispatch
from kernel_dispatch.numerics import measure

Model = Callable[..., torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


def make(width: int = 512, rows: int = 64) -> tuple[torch.nn.Module, Inputs]:
    """Your model and its inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, width),
        torch.nn.LayerNorm(width),
    )
    return model.eval(), (torch.randn(rows, width),)


@dataclass(frozen=True)
class Timing:
    name: str
    first_call_s: float  # compilation included
    median_ms: float
    speedup: float  # over eager, in the same round


def seconds(call: Model, inputs: Inputs) -> float:
    wait_for_the_device()
    start = time.perf_counter()
    call(*inputs)
    wait_for_the_device()
    return time.perf_counter() - start


def wait_for_the_device() -> None:
    """When a call returns, an accelerator has its work queued, not done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def verify(name: str, call: Model, model: torch.nn.Module, inputs: Inputs) -> None:
    """Not further from float64 than the contract of the levels allows."""
    truth = copy.deepcopy(model).double()(*(tensor.double() for tensor in inputs))
    found = measure(call(*inputs), model(*inputs), truth)
    if not found.kept:
        raise AssertionError(
            f"{name} is off by {found.candidate:.1e}, where eager is by {found.eager:.1e}"
        )


def time_in_rounds(calls: dict[str, Model], inputs: Inputs, rounds: int) -> dict[str, list[float]]:
    """The seconds of every round; each contender warms up first."""
    for call in calls.values():
        for _ in range(3):
            call(*inputs)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(seconds(calls[name], inputs))
    return times


@torch.no_grad()
def main(
    levels: tuple[str, ...] = ("O1", "O2"), rounds: int = 30, width: int = 512
) -> list[Timing]:
    model, inputs = make(width)
    calls: dict[str, Model] = {"eager": model}
    for level in levels:
        calls[level] = torch.compile(model, backend="unified", options={"level": level})
    first = {name: seconds(call, inputs) for name, call in calls.items()}
    for name, call in calls.items():
        verify(name, call, model, inputs)

    times = time_in_rounds(calls, inputs, rounds)
    rows = []
    for name, own in times.items():
        ratios = [eager / mine for eager, mine in zip(times["eager"], own, strict=True)]
        median_ms = 1000 * statistics.median(own)
        rows.append(Timing(name, first[name], median_ms, statistics.median(ratios)))

    print(kernel_dispatch.report())
    for row in rows:
        print(
            f"{row.name:6} {row.median_ms:8.3f} ms  {row.speedup:5.2f}x of eager's speed; "
            f"the first call took {row.first_call_s:.1f} s"
        )
    return rows


if __name__ == "__main__":
    main()
