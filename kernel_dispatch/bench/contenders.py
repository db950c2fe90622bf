"""The contenders that every installation has: eager, Inductor, `unified` at its levels, and any
backend that torch.compile knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from kernel_dispatch import calibration
from kernel_dispatch.bench.contender import Contender
from kernel_dispatch.bench.results import BASELINE
from kernel_dispatch.bench.workload import Case
from kernel_dispatch.numerics import EAGER_FACTOR
from kernel_dispatch.settings import list_levels, resolve
from kernel_dispatch.user_code import named
from lowering.errors import unknown
from lowering.levels import Level
from lowering.native import library


def _as_it_is(case: Case) -> Callable[..., Any]:
    return case.fn


def _compiled(case: Case, backend: str, **more: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(case.fn, backend=backend, **more)
    return compiled


EAGER = Contender(BASELINE, "the model as it is", _as_it_is, compiles_with_dynamo=False)
INDUCTOR = Contender("inductor", "torch.compile(model)", partial(_compiled, backend="inductor"))


def _unified(case: Case, level: str) -> Callable[..., Any]:
    """Kernels that are built and rates that are measured once per machine are no part of the time
    that a model takes to compile: they are made before the clock starts."""
    settings = resolve(None, {"level": level})
    if settings.level >= Level.O2:
        library.keep_in(settings.cache_folder)
        library.probe()
        calibration.current(settings, auto=True)
    return _compiled(case, backend="unified", options={"level": level})


def unified(level: str) -> Contender:
    return Contender(
        f"unified-{level}",
        f'torch.compile(model, backend="unified", options={{"level": "{level}"}})',
        partial(_unified, level=level),
        error_factor=EAGER_FACTOR,
    )


def registered(backend: str) -> Contender:
    """Any other name that torch.compile accepts on this machine."""
    return Contender(
        backend, f'torch.compile(model, backend="{backend}")', partial(_compiled, backend=backend)
    )


def users_own(target: str) -> Contender:
    """A backend of the user's: a function of (graph module, example inputs), by module:function."""

    def prepare(case: Case) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(case.fn, backend=named(target))
        return compiled

    return Contender(target, f"torch.compile(model, backend={target})", prepare)


def chosen(
    names: Sequence[str], levels: Sequence[str], peers: Sequence[Contender] = ()
) -> list[Contender]:
    """The baseline first, then what was asked for; `unified` stands for one row per level."""
    known = {one.name: one for one in (EAGER, INDUCTOR, *map(unified, list_levels()), *peers)}
    wanted = {BASELINE: EAGER}
    for name in names:
        if name == "unified":
            wanted.update((one.name, one) for one in map(unified, levels))
        elif name in known:
            wanted[name] = known[name]
        else:
            wanted[name] = users_own(name) if ":" in name else _registered_or_error(name, known)
    return list(wanted.values())


def find(name: str, peers: Sequence[Contender] = ()) -> Contender:
    return chosen([name], (), peers)[-1]


def _registered_or_error(name: str, known: Iterable[str]) -> Contender:
    from torch._dynamo import list_backends

    if name not in list_backends(exclude_tags=None):  # for debugging and tests: taken, not praised
        accepted = ["unified", *known, *list_backends(), "module:function"]
        raise unknown("backend", name, accepted, "--backends")
    return registered(name)
