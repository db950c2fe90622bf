"""The same model on every backend that is here; those that are not say why.

There are two ways to ask for a backend that may be absent. The factory raises
`BackendNotAvailableError`, which says why and lists what is there. A class of
`kernel_dispatch.backends` can be built anyway: its `is_available` is False. Neither ever runs on
another device in silence.

The answers are compared with eager's before anything is timed; how to time well is in
time_your_model.py.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import BackendNotAvailableError
from kernel_dispatch.backends import BackendFactory, BackendType, BaseBackend

EVERY = tuple(kind for kind in BackendType if kind is not BackendType.AUTO)


@dataclass(frozen=True)
class Row:
    backend: str
    median_ms: float | None  # None: it is not here
    computed_by: str  # from the report; for an absent one, why it is absent


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()


def time_on(backend: BaseBackend, level: str, calls: int) -> Row:
    torch.compiler.reset()
    plain, x = make_model(), torch.randn(8, 64)
    with torch.no_grad():
        expected = plain(x)

    model = backend.prepare_model(make_model(), level)
    model = backend.optimize_for_inference(model, sample_input=x)
    x = backend.to_device(x)
    torch.testing.assert_close(model(x).cpu(), expected, rtol=1e-4, atol=1e-5)

    times = []
    for _ in range(calls):
        backend.synchronize()
        start = time.perf_counter()
        model(x)
        backend.synchronize()
        times.append(time.perf_counter() - start)

    report = kernel_dispatch.report(model)
    print(report)
    regions = [f"{r.name} by {r.provider}" for graph in report for r in graph.regions]
    who = ", ".join([*(f"graph by {graph.provider}" for graph in report), *regions])
    return Row(str(backend.BACKEND_NAME), 1000 * statistics.median(times), who)


def main(level: str = "O2", calls: int = 50) -> list[Row]:
    rows = []
    for kind in EVERY:
        try:
            backend = BackendFactory.create(kind)
        except BackendNotAvailableError as absent:
            rows.append(Row(kind.value, None, str(absent)))
            continue
        with backend:
            rows.append(time_on(backend, level, calls))
    print()
    for row in rows:
        shown = "not here  " if row.median_ms is None else f"{row.median_ms:7.3f} ms"
        print(f"{row.backend:8} {shown}  {row.computed_by}")
    return rows


if __name__ == "__main__":
    main()
