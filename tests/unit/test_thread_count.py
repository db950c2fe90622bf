"""A call with a thread count of its own leaves no trace in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from kernel_dispatch.thread_count import with_threads


def _count_of_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def _overlapping(first: int, second: int) -> dict[str, int]:
    """Two threads, new to torch, whose calls overlap; what each saw during and after its call."""
    seen: dict[str, int] = {}
    entered, inside, left = threading.Event(), threading.Event(), threading.Event()

    def call(name: str, threads: int, body: Callable[[], None]) -> None:
        def run() -> None:
            seen[f"{name} during"] = torch.get_num_threads()
            body()

        with_threads(run, threads)()
        seen[f"{name} after"] = torch.get_num_threads()

    def one() -> None:
        call("first", first, lambda: (entered.set(), inside.wait(10)))  # type: ignore[arg-type,return-value]
        left.set()

    def two() -> None:
        entered.wait(10)
        call("second", second, lambda: (inside.set(), left.wait(10)))  # type: ignore[arg-type,return-value]

    workers = [threading.Thread(target=one), threading.Thread(target=two)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return seen


def test_overlapping_calls_leave_no_count_behind() -> None:
    mine = torch.get_num_threads()
    try:
        for first, second in [(mine + 2, mine + 1), (mine + 1, mine + 1), (mine + 1, mine)]:
            assert _overlapping(first, second) == {
                "first during": first,
                "first after": mine,
                "second during": second,
                "second after": mine,
            }
            assert _count_of_a_new_thread() == mine
            assert torch.get_num_threads() == mine
    finally:
        torch.set_num_threads(mine)


def test_a_call_inside_a_call() -> None:
    mine = torch.get_num_threads()
    seen: list[int] = []
    inner = with_threads(lambda: seen.append(torch.get_num_threads()), mine + 1)

    def body() -> None:
        inner()
        seen.append(torch.get_num_threads())

    with_threads(body, mine + 2)()
    assert seen == [mine + 1, mine + 2]
    assert torch.get_num_threads() == mine
