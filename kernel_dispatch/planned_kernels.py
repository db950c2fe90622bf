"""Kernels of ours in a lowered graph: how they would be launched, and how the real compiler
translates them for an architecture that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowering.graphs import hint
from triton_kernels import cross_compiling
from triton_kernels.architectures import Architecture
from triton_kernels.cross_compiling import Binary
from triton_kernels.launching import Launch


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel of ours, as it would be launched, and how the real compiler translated it."""

    launch: Launch
    times: int
    binary: Binary | None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kernel": self.launch.name,
            "launches": self.times,
            "grid": list(self.launch.grid),
            "config": self.launch.config.as_dict(),
            "error": self.error,
        }
        if self.binary is not None:
            found.update(
                registers=self.binary.registers,
                spilled_bytes=self.binary.spills,
                shared_bytes=self.binary.shared_bytes,
                occupancy=round(self.binary.occupancy, 3),
            )
        return found

    def __str__(self) -> str:
        head = f"{self.launch.name} x{self.times}: grid {self.launch.grid}, {self.launch.config}"
        if self.binary is None:
            return f"{head}: {self.error}"
        told = self.binary
        return (
            f"{head}: {told.registers} registers, {told.spills} bytes spilled, "
            f"{told.shared_bytes} bytes of shared memory, occupancy {told.occupancy:.0%}"
        )


def kernels_of(
    modules: Sequence[fx.GraphModule], architecture: Architecture
) -> list[PlannedKernel]:
    """The launches of our operators in these graphs, equal ones together."""
    counted: dict[str, tuple[Launch, int]] = {}
    for node in (node for module in modules for node in module.graph.nodes):
        for launch in _launches_of(node, architecture):
            key = f"{launch.name} {launch.grid} {launch.config} {_shapes(launch)}"
            counted[key] = (launch, counted.get(key, (launch, 0))[1] + 1)
    return [_compiled(launch, times, architecture) for launch, times in counted.values()]


def _shapes(launch: Launch) -> list[Any]:
    return [
        (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for value in launch.arguments.values()
    ]


def _launches_of(node: fx.Node, architecture: Architecture) -> list[Launch]:
    from triton_kernels.registration import NAMESPACE, OnPaper

    target: Any = node.target
    name = str(getattr(target, "_schema", None) and target._schema.name)
    args, kwargs = pytree.tree_map(_without_memory, (node.args, dict(node.kwargs)))
    with OnPaper() as paper:
        if name.startswith(f"{NAMESPACE}::"):
            target(*args, **kwargs)
        elif name == "kernel_dispatch::reduced_linear":
            from lowering import reduced_linear

            reduced_linear.on_paper(*args, **kwargs)
    return paper.launches


def _without_memory(value: Any) -> Any:
    """A tensor of the device "meta" as the node's value lies in memory."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = ([hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")


def _compiled(launch: Launch, times: int, architecture: Architecture) -> PlannedKernel:
    try:
        return PlannedKernel(launch, times, cross_compiling.compile(launch, architecture))
    except Exception as error:  # noqa: BLE001  (Triton absent, or a kernel that does not compile)
        return PlannedKernel(launch, times, None, f"{type(error).__name__}: {error}")
