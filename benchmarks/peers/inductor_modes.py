"""Inductor with more effort: frozen weights, max-autotune, and both, as on a CPU it needs both.

Its C++ templates take products with a frozen weight, or of two activations; without freezing
`mode="max-autotune"` therefore tunes the latter only. It is what its users type, so it is here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.peers.evidence import PeerError, inductor_code, watched, weights_frozen
from kernel_dispatch.bench import Case, Contender

FREEZING = {"TORCHINDUCTOR_FREEZING": "1"}


def require_freezing() -> None:
    """Dynamo has to know before it traces, and the backend's options arrive after that."""
    from torch._inductor import config

    if not config.freezing:
        raise PeerError("TORCHINDUCTOR_FREEZING=1 has to be set before torch is imported")


def weights_of(case: Case) -> int:
    fn: Any = case.fn
    return sum(1 for _ in fn.parameters()) if isinstance(fn, torch.nn.Module) else 0


@contextlib.contextmanager
def _frozen_code(case: Case) -> Iterator[None]:
    with weights_frozen(weights_of(case)), inductor_code():
        yield


def _frozen(case: Case, **options: Any) -> Callable[..., Any]:
    require_freezing()
    return watched(torch.compile(case.fn, **options), partial(_frozen_code, case))


def _tuned(case: Case) -> Callable[..., Any]:
    return watched(torch.compile(case.fn, mode="max-autotune"), inductor_code)


PEERS = (
    Contender(
        "inductor-freezing",
        "TORCHINDUCTOR_FREEZING=1, torch.compile(model)",
        _frozen,
        environment=FREEZING,
        trains=False,
    ),
    Contender(
        "inductor-max-autotune",
        'torch.compile(model, mode="max-autotune")',
        _tuned,
    ),
    Contender(
        "inductor-max-autotune-freezing",
        'TORCHINDUCTOR_FREEZING=1, torch.compile(model, mode="max-autotune")',
        partial(_frozen, mode="max-autotune"),
        environment=FREEZING,
        trains=False,
    ),
)
