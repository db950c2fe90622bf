"""The contenders of a comparison, and the interleaved timing that compares them fairly."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LEVELS = ("O0", "O1", "O2", "O3")


@dataclass
class Contender:
    name: str
    run: Callable[..., Any]
    first_call_s: float = 0.0
    median_s: float = 0.0
    spread_s: float = 0.0  # between the quartiles
    error: float = 0.0  # largest relative error against float64


def make(model: torch.nn.Module) -> list[Contender]:
    """Eager, Inductor as its users run it, and `unified` at every level."""
    contenders = [
        Contender("eager", model),
        Contender("inductor", torch.compile(model)),
    ]
    for level in LEVELS:
        compiled = torch.compile(model, backend="unified", options={"level": level})
        contenders.append(Contender(f"unified {level}", compiled))
    return contenders


def first_calls(contenders: list[Contender], inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Compile each; the outputs come back to be checked before anything is timed."""
    outputs = []
    for contender in contenders:
        start = time.perf_counter()
        outputs.append(contender.run(*inputs))
        contender.first_call_s = time.perf_counter() - start
    return outputs


def time_interleaved(
    contenders: list[Contender], inputs: tuple[Any, ...], rounds: int, seed: int = 0
) -> None:
    """Each round runs every contender once, in a fresh order: noise hits all alike."""
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds + 1):
        order = list(contenders)
        shuffle(order)
        for contender in order:
            start = time.perf_counter()
            contender.run(*inputs)
            if turn:  # the first round warms up
                seconds[contender.name].append(time.perf_counter() - start)
    for contender in contenders:
        quartiles = statistics.quantiles(seconds[contender.name], n=4)
        contender.median_s, contender.spread_s = quartiles[1], quartiles[2] - quartiles[0]


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (output.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())


def table(contenders: list[Contender]) -> str:
    eager = next(c for c in contenders if c.name == "eager")
    head = f"{'':<12}{'median ms':>11}{'spread':>8}{'x eager':>9}{'first call s':>14}{'error':>10}"
    lines = [head, "-" * len(head)]
    lines += [
        f"{c.name:<12}{c.median_s * 1e3:>11.2f}{c.spread_s * 1e3:>8.2f}"
        f"{eager.median_s / c.median_s:>9.2f}{c.first_call_s:>14.1f}{c.error:>10.1e}"
        for c in contenders
    ]
    return "\n".join(lines)
