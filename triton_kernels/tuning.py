"""Which configuration a launch takes: the fastest measured on this kind of GPU, else the first.

Chosen in Python before the launch and never by `@triton.autotune`: a graph that was compiled with
other sizes would keep that one's choice, and every rank of a job would time on its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config

Problem = tuple[Any, ...]  # whatever a configuration may depend on: sizes, dtypes, flags


class _Place:
    folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Where tuned choices are looked for and kept; None: nowhere."""
    if folder != _Place.folder:
        _Place.folder = folder
        _stored.cache_clear()


Asked = list[tuple[str, Sequence[Config]]]  # the key of a choice, and its candidates
# Set while `tune` or a test goes through the candidates: which one to take, and what was asked.
_nth: contextvars.ContextVar[int | None] = contextvars.ContextVar("nth", default=None)
_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("asked", default=None)


def choose(
    kernel: str, architecture: Architecture, problem: Problem, candidates: Sequence[Config]
) -> Config:
    """One of `candidates`. `problem` is what a measured choice is stored under."""
    key = " ".join([kernel, *map(str, problem)])
    if (asked := _asked.get()) is not None:
        asked.append((key, candidates))
    if (nth := _nth.get()) is not None:
        return candidates[min(nth, len(candidates) - 1)]
    stored = _stored(architecture.name).get(key)
    if stored is None:
        return candidates[0]
    return next((one for one in candidates if str(one) == stored), candidates[0])


@contextlib.contextmanager
def taking(nth: int) -> Iterator[None]:
    """Every launch takes its nth candidate, or its last where it has fewer."""
    token = _nth.set(nth)
    try:
        yield
    finally:
        _nth.reset(token)


@contextlib.contextmanager
def asking() -> Iterator[Asked]:
    """Collects the choices that the launches inside have to make."""
    asked: Asked = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def tune(
    run: Callable[[], Any],
    architecture: Architecture,
    milliseconds: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, str]:
    """Time `run` with every candidate of the launches in it, keep the fastest, and return it.

    All launches of one `run` take their nth candidate together: tune one kernel at a time.
    """
    with asking() as asked:
        run()
    times: dict[int, float] = {}
    for nth in range(max((len(candidates) for _, candidates in asked), default=0)):
        with taking(nth), contextlib.suppress(Exception):  # too large for this card: no candidate
            times[nth] = (milliseconds or _on_the_gpu)(run)
    if not times:
        return {}
    best = min(times, key=lambda nth: times[nth])
    chosen = {key: str(some[min(best, len(some) - 1)]) for key, some in asked}
    _store(architecture.name, chosen)
    return chosen


def _on_the_gpu(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


def _file(architecture: str) -> Path | None:
    return None if _Place.folder is None else _Place.folder / f"triton_{architecture}.json"


@functools.cache
def _stored(architecture: str) -> dict[str, str]:
    path = _file(architecture)
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):  # not there yet, or half a file: the shipped order counts
        return {}
    return found if isinstance(found, dict) else {}


def _store(architecture: str, choices: dict[str, str]) -> None:
    path = _file(architecture)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _stored.cache_clear()
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps({**_stored(architecture), **choices}, indent=1, sort_keys=True))
    half.replace(path)  # in one step: other processes may be reading
    _stored.cache_clear()
