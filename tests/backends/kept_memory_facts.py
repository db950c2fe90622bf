"""What a process sees of the memory that compiled graphs keep, as JSON; run by test_kept_memory.py.

A process of its own, since the store, its limit and its page faults belong to the process.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import kernel_dispatch
from lowering.native import library

ROWS, WIDTH = 512, 1024  # an activation of 2 MiB


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def faults_of(call: Callable[[], Any], times: int = 10) -> int:
    for _ in range(3):
        call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def inference(facts: dict[str, Any], x: torch.Tensor, plain: nn.Module, run: Any) -> None:
    with torch.no_grad():
        kept = [run(x + i) for i in range(4)]
        wanted = [plain(x + i) for i in range(4)]
        facts["held outputs are right"] = all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(kept, wanted, strict=True)
        )
        kept[0].resize_(2 * ROWS, WIDTH).fill_(1.0)
        facts["can be resized"] = bool(kept[0].sum() == 2 * ROWS * WIDTH)
        del kept
        facts["idle after"] = library.idle_bytes()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run(x)
        facts["profiled"] = max(event.self_cpu_memory_usage for event in profiled.key_averages())
        outside = torch.empty(ROWS, WIDTH)
        before = library.idle_bytes()
        del outside
        facts["tensors of others are kept"] = library.idle_bytes() != before


def behind(facts: dict[str, Any]) -> None:
    """Sizes that are whole pages: where would a vector that reaches beyond the last row be read?"""
    library.pool_depth().value += 1
    made = torch.empty(7 << 20, dtype=torch.uint8)
    library.pool_depth().value -= 1
    before = library.idle_bytes()
    del made
    facts["bytes behind a block"] = library.idle_bytes() - before - (7 << 20)


def threads(facts: dict[str, Any], x: torch.Tensor, plain: nn.Module, run: Any) -> None:
    right = []

    def work(number: int) -> None:
        with torch.no_grad():
            for i in range(5):
                mine = x + number + i
                right.append(torch.allclose(run(mine), plain(mine), atol=1e-5))

    all_ = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in all_:
        one.start()
    for one in all_:
        one.join()
    facts["threads are right"] = len(right) == 20 and all(right)


def training(facts: dict[str, Any], x: torch.Tensor, options: dict[str, str]) -> None:
    run = torch.compile(model(), backend="unified", options=options)

    def step() -> None:
        run.zero_grad()
        run(x).sum().backward()

    facts["faults of ten steps"] = faults_of(step)


def child(facts: dict[str, Any]) -> None:
    pid = os.fork()
    if pid == 0:
        library.pool_depth().value += 1
        made = [torch.full((ROWS, WIDTH), float(i)) for i in range(3)]
        os._exit(0 if all(bool((t == i).all()) for i, t in enumerate(made)) else 1)
    facts["child ended with"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(keep: str) -> None:
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    plain, x = model(), torch.randn(ROWS, WIDTH)
    options = {"level": "O2", "keep_memory": keep}
    run = torch.compile(plain, backend="unified", options=options)
    inference(facts, x, plain, run)
    threads(facts, x, plain, run)
    child(facts)
    if keep == "auto":
        behind(facts)
        training(facts, x, options)
    del run
    gc.collect()
    facts["idle at last"] = library.idle_bytes()
    kernel_dispatch.reset()
    facts["idle after reset"] = library.idle_bytes()
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
