"""AMD's zentorch: Inductor with frozen weights, and ZenDNN's operators in its graphs.

It needs AVX-512; without, or where none of its operators fits, it is plain Inductor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.evidence import PeerError, inductor_code, watched, weights_frozen
from benchmarks.peers.inductor_modes import FREEZING, require_freezing, weights_of
from benchmarks.peers.installation import installed, versions
from kernel_dispatch.bench import Case, Contender

_INSTALL = "pip install --no-deps zentorch==2.13.0.2"


def _missing() -> str:
    if not installed("zentorch"):
        return f"needs zentorch: {_INSTALL} (beside torch 2.13; its dependencies are not needed)"
    if not torch.cpu._is_avx512_supported():
        return (
            f"{versions('zentorch')} needs AVX-512, which this CPU does not have: "
            "it would run as inductor-freezing does"
        )
    return ""


def judge(sources: Iterable[str]) -> None:
    """`sources`: the code that Inductor generated."""
    if not any("torch.ops.zentorch" in source for source in sources):
        raise PeerError("zentorch put none of its operators into it: it ran as inductor-freezing")


@contextlib.contextmanager
def _watch(case: Case) -> Iterator[None]:
    with weights_frozen(weights_of(case)), inductor_code() as modules:
        yield
    judge(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


def _prepare(case: Case) -> Callable[..., Any]:
    require_freezing()
    import zentorch  # noqa: F401  (registers the backend)

    compiled: Callable[..., Any] = torch.compile(case.fn, backend="zentorch")
    return watched(compiled, partial(_watch, case))


PEERS = (
    Contender(
        "zentorch",
        'TORCHINDUCTOR_FREEZING=1, import zentorch, torch.compile(model, backend="zentorch")',
        _prepare,
        missing=_missing,
        version=partial(versions, "zentorch"),
        environment=FREEZING,
        trains=False,
    ),
)
