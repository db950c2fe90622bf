"""Graphs lowered for a GPU that is not here and run on this machine's CPU, where operators of ours
compute their plain meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kernel_dispatch import dry_running
from kernel_dispatch.settings import resolve


class Lowered:
    """A torch.compile backend; `graphs` are what it planned."""

    def __init__(self, device: str, **options: Any) -> None:
        self.architecture = dry_running.parse_device(device)
        self.settings = resolve(None, options)
        self.graphs: list[dry_running.PlannedGraph] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        planned = dry_running.planned(gm, inputs, self.settings, self.architecture)
        assert not planned.error, planned.error
        assert planned.run is not None
        self.graphs.append(planned)
        return planned.run

    def regions(self) -> dict[tuple[str, str], int]:
        return dry_running.DryRun("", "", self.graphs).regions()

    def kernels(self) -> list[str]:
        return [kernel.launch.name for graph in self.graphs for kernel in graph.kernels]


def lowered(fn: Callable[..., Any], device: str, **options: Any) -> tuple[Any, Lowered]:
    """`fn`, lowered for `device` and runnable here, and what was planned."""
    torch._dynamo.reset()
    backend = Lowered(device, **options)
    return torch.compile(fn, backend=backend), backend
