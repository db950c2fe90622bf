"""Workloads and backends with one planted property each, for the tests of the harness."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

_words = ["a"]


def mlp() -> tuple[Any, tuple[torch.Tensor, ...]]:
    layers = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
    return torch.nn.Sequential(*layers).eval(), (torch.randn(8, 32),)


class _Clock:
    """Time as a busy machine shows it, and the same on every machine: what is waited for, a few
    percent of noise, and now and then somebody else's turn."""

    def __init__(self) -> None:
        self._now = 0.0
        self._noise = random.Random(os.getpid())

    def read(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        taken_away = 0.5 if self._noise.random() < 0.02 else 0.0
        self._now += seconds * (1 + abs(self._noise.gauss(0, 0.03)) + taken_away)


_clock = _Clock()


def busy() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """4 ms by a clock of its own, which the worker that measures it then reads."""
    time.perf_counter = _clock.read

    def spin(x: torch.Tensor) -> torch.Tensor:
        return _wait(x, 0.004)

    return spin, (torch.ones(4),)


def dropout() -> tuple[Any, tuple[torch.Tensor, ...]]:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout()).train(), (
        torch.randn(4, 8),
    )


def counting() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Writes into its input: every call gives something else."""
    return lambda state: state.add_(1).clone(), (torch.zeros(3),)


def new_word_each_call() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Dynamo has to compile every call anew: it depends on a string that is never the same."""
    words = itertools.count()

    class Model(torch.nn.Module):
        word = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + len(self.word)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.word = f"{next(words):06d}"
            return super().__call__(x)

    return Model(), (torch.ones(4),)


def worded() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Dynamo compiles it for the word as it is; `changes_the_word` changes it later."""
    _words[-1] = "a"
    return lambda x: x + 0 * len(_words[-1]), (torch.ones(4),)


def unseeded() -> tuple[Any, tuple[torch.Tensor, ...]]:
    generator = torch.Generator()
    generator.seed()
    return torch.nn.ReLU(), (torch.randn(4, generator=generator),)


def reading() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """As a forgotten `input()` or `breakpoint()` does; there is nothing to read."""
    input()
    return torch.nn.ReLU(), (torch.ones(3),)


def no_tensor() -> tuple[Any, tuple[torch.Tensor, ...]]:
    return lambda x: x.shape[0], (torch.ones(3),)


def raising() -> tuple[Any, tuple[torch.Tensor, ...]]:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted in the model")

    return model, (torch.ones(3),)


@torch.library.custom_op("rigged::wait", mutates_args=())
def _wait(x: torch.Tensor, seconds: float) -> torch.Tensor:
    _clock.wait(seconds)
    return x.clone()


@_wait.register_fake
def _(x: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


Backend = Callable[..., Any]


def as_it_is(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    return gm.forward


def a_tenth_slower(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    def run(*args: Any) -> Any:
        start = _clock.read()
        result = gm.forward(*args)
        _clock.wait(0.1 * (_clock.read() - start))
        return result

    return run


def one_percent_off(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    return lambda *args: [out * 1.01 for out in gm.forward(*args)]


def wrong_after_a_while(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    calls = itertools.count()
    return lambda *args: [out + (next(calls) > 10) for out in gm.forward(*args)]


def changes_the_word(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    """Quiet while it warms up; after a while the next call has to be compiled anew."""
    calls = itertools.count()

    def run(*args: Any) -> Any:
        if next(calls) == 20:
            _words[-1] = "bb"
        return gm.forward(*args)

    return run


def wrong_shape(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    return lambda *args: [out[:1] for out in gm.forward(*args)]


def wrong_infinity(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    return lambda *args: [out / 0 for out in gm.forward(*args)]


def dying(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    def run(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)

    return run


def refusing(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    raise NotImplementedError("planted: not on a Saturday")


def noisy(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    def run(*args: Any) -> Any:
        print("planted on stdout")
        os.write(1, b"planted on file descriptor 1\n")
        return gm.forward(*args)

    return run


def hanging(gm: torch.fx.GraphModule, inputs: Any) -> Backend:
    def run(*args: Any) -> Any:
        time.sleep(600)

    return run
