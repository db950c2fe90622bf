"""The suite in pytest-benchmark's hands: one process, verified before timing, a group per workload.

`python -m kernel_dispatch bench` is fairer on a noisy machine, since it interleaves contenders that
run in processes of their own; here they run one after the other, and pytest-benchmark keeps the
books. Inference without gradients, float32, unless a file says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_dispatch.bench.surroundings import machine
from kernel_dispatch.bench.worker import Worker

SECONDS = 1.0  # of timing, for each contender
MIN_ROUNDS, MAX_ROUNDS = 5, 100


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def verified(tmp_path: Path) -> Callable[..., Worker]:
    """A contender that was compared with float64, and is warm."""

    def build(workload: str, contender: str) -> Worker:
        truth = str(tmp_path / "truth.pt")
        built = {"target": workload, "seed": 0, "dtype": None, "training": False}
        baseline = Worker("eager")
        baseline.build(**built)
        baseline.establish(truth)
        worker = Worker(contender)
        worker.build(**built)
        worker.prepare()
        worker.first_call(truth)
        return worker

    return build


@pytest.fixture
def timed(benchmark: Any, verified: Callable[..., Worker]) -> Callable[[str, str], Worker]:
    """Times one contender on one workload; a recompilation while it does fails the test."""

    def run(workload: str, contender: str) -> Worker:
        benchmark.group = workload
        worker = verified(workload, contender)
        warm = worker.warm_up()
        calls = warm["calls"]
        rounds = int(SECONDS / max(warm["seconds"] * calls, 1e-6))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
        benchmark.pedantic(worker.call, rounds=rounds, iterations=calls)
        worker.demand_quiet()
        return worker

    return run


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.update({f"kernel_dispatch_{k}": v for k, v in machine(None).items()})
