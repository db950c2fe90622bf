"""Threads that slept are woken off the caller's CPU, and are left as free as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_dispatch.facts import nothing_known
from kernel_dispatch.sleeping_threads import waking_threads
from lowering import machine
from lowering.native import library

pytestmark = [
    pytest.mark.usefixtures("cpu_kernels"),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems wake threads themselves"),
]
PAUSE = 0.05


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def allowed_cpus() -> dict[int, set[int]]:
    """Of each thread of this process; some may end meanwhile."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def bind(threads: dict[int, set[int]]) -> None:
    for thread, cpus in threads.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cpus)


def multiply() -> None:
    """With both threads."""
    x = torch.ones(256, 256)
    torch.ops.kernel_dispatch.openmp_linear(x, x, None, None, None, None, 0, 0.0, 0.0)


def woken() -> bool:
    wake = library.waker()
    assert wake is not None
    return wake()


@pytest.mark.usefixtures("two_threads")
def test_only_after_a_pause() -> None:
    time.sleep(PAUSE)
    assert woken()
    # A busy machine may make a pause of its own between two calls, but hardly five times.
    assert not all(woken() for _ in range(5))


@pytest.mark.usefixtures("two_threads")
def test_not_where_a_product_has_kept_them_awake() -> None:
    def woken_behind_a_product() -> bool:
        time.sleep(PAUSE)
        multiply()
        return woken()

    assert not all(woken_behind_a_product() for _ in range(5))


@pytest.mark.usefixtures("two_threads")
def test_threads_may_run_where_they_might_before() -> None:
    woken()
    before = allowed_cpus()
    for _ in range(3):
        time.sleep(PAUSE)
        assert woken()
        now = allowed_cpus()
        assert {thread: now.get(thread, cpus) for thread, cpus in before.items()} == before


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_was_bound_stays_bound() -> None:
    woken()
    before, one = allowed_cpus(), {min(os.sched_getaffinity(0))}
    try:
        bind(dict.fromkeys(before, one))
        time.sleep(PAUSE)
        assert woken()
        assert all(cpus == one for thread, cpus in allowed_cpus().items() if thread in before)
    finally:
        bind(before)


def last_cpus() -> dict[int, int]:
    """Where each thread of this process ran last."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            found[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[36])
    return found


def one_was_woken_elsewhere() -> bool:
    """All have last run on the caller's CPU, which is where they would be woken."""
    woken()
    before, here = allowed_cpus(), min(os.sched_getaffinity(0))
    try:
        bind({thread: {here} for thread in before})
        multiply()
        bind({thread: cpus for thread, cpus in before.items() if thread != os.getpid()})
        time.sleep(PAUSE)
        slept_here = {thread for thread, cpu in last_cpus().items() if cpu == here}
        assert woken()
        now = last_cpus()
        return any(now.get(thread, here) != here for thread in slept_here)
    finally:
        bind(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(machine.cpu().affinity_cores < 2, reason="there is no other CPU")
def test_they_are_woken_on_another_cpu_than_the_callers() -> None:
    # A busy machine may move one back before it is looked at.
    assert any(one_was_woken_elsewhere() for _ in range(3))


def test_alone_there_is_nobody_to_wake() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        time.sleep(PAUSE)
        assert not woken()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("target", "flops", "moved", "wakes"),
    [
        ("cpu", 10_000_000, 0, True),
        ("cpu", 0, 1 << 20, True),
        ("cpu", 1000, 1000, False),
        ("cuda", 10_000_000, 1 << 20, False),
    ],
)
def test_for_graphs_on_the_cpu_with_work_for_several(
    target: str, flops: int, moved: int, wakes: bool
) -> None:
    facts = dataclasses.replace(nothing_known("here"), flops=flops, bytes_moved=moved)
    assert (waking_threads(multiply, target, facts) is not multiply) == wakes
