"""What it costs to go back and forth between backends whose code is compiled already.

The three figures of a group belong together: two calls of one backend, two of the other, and one
of each in turn. What the last one takes beyond the mean of the first two is the switch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_dispatch
from benchmarks.workloads import WORKLOADS
from kernel_dispatch.bench.stepping import Step
from kernel_dispatch.registry import BackendRegistry, CompileContext

PAIRS = {
    "unified-O2 and inductor": ({"backend": "unified"}, {"backend": "inductor"}),
    "unified-O0 and unified-O2": (
        {"backend": "unified", "options": {"level": "O0"}},
        {"backend": "unified", "options": {"level": "O2"}},
    ),
}


@pytest.mark.parametrize("turn", ("first twice", "second twice", "in turn"))
@pytest.mark.parametrize("pair", PAIRS)
def test_backend_switch(benchmark: Any, pair: str, turn: str) -> None:
    benchmark.group = f"switch {pair}"
    torch.manual_seed(0)
    step = Step(WORKLOADS["five-ops"].build(), training=False)
    first, second = (
        step.with_fn(torch.compile(step.case.fn, **arguments)) for arguments in PAIRS[pair]
    )
    some, other = {
        "first twice": (first, first),
        "second twice": (second, second),
        "in turn": (first, second),
    }[turn]
    expected = step.run()
    for one in (some, other):
        torch.testing.assert_close(one.run(), expected)
    benchmark(_both, some.run, other.run)


@pytest.mark.parametrize("turn", ("first twice", "second twice", "in turn"))
def test_provider_switch(benchmark: Any, turn: str) -> None:
    """Two of the fourteen providers, each with graphs of its own."""
    benchmark.group = "switch oneDNN and MKL"
    first, second = (_by_provider(name) for name in ("mkldnn", "mkl"))
    some, other = {
        "first twice": (first, first),
        "second twice": (second, second),
        "in turn": (first, second),
    }[turn]
    benchmark(_both, some, other)


def _by_provider(name: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(512, 512).eval(), torch.randn(64, 512)
    provider = BackendRegistry.instance().get_backend(name)
    asked = CompileContext(model, (x,), level="O1")
    if provider is None or not provider.compile(asked):
        pytest.skip(f"{name}: {asked.error}")
    assert asked.compiled is not None
    assert asked.taken == (f"linear:{name}",), asked.notes
    torch.testing.assert_close(asked.compiled(x), model(x))
    return functools.partial(asked.compiled, x)


def test_default_switch(benchmark: Any) -> None:
    """What `set_default_backend` itself costs, there and back."""
    benchmark.group = "switch the default"

    def switch() -> None:
        kernel_dispatch.set_default_backend("cpu")
        kernel_dispatch.set_default_backend(None)

    benchmark(switch)


def _both(some: Callable[[], Any], other: Callable[[], Any]) -> None:
    some()
    other()
