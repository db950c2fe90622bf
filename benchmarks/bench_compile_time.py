"""From torch.compile to the first result: with empty caches, and with those of an earlier run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import clear_caches

from benchmarks.workloads import WORKLOADS
from kernel_dispatch.bench.contenders import find
from kernel_dispatch.bench.stepping import Step

CONTENDERS = ("inductor", "unified-O0", "unified-O1", "unified-O2")


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("workload", ("mlp-swiglu", "unet-block"))
@pytest.mark.parametrize("caches", ("cold", "warm"))
def test_compile_time(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workload: str,
    contender: str,
    caches: str,
) -> None:
    benchmark.group = f"compile time {workload} {caches}"
    torch.manual_seed(0)
    step = Step(WORKLOADS[workload].build(), training=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "warm"))
    _first_result(step, contender)()  # the compiler itself is imported and warm
    rounds = iter(range(100))

    def set_up() -> tuple[tuple[()], dict[str, Any]]:
        torch._dynamo.reset()
        clear_caches()  # those in memory, which a new process does not have
        if caches == "cold":
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"cold{next(rounds)}"))
        return (), {}

    benchmark.pedantic(_first_result(step, contender), setup=set_up, rounds=3)


def _first_result(step: Step, contender: str) -> Callable[[], Any]:
    prepare = find(contender).prepare
    return lambda: step.with_fn(prepare(step.case)).run()
