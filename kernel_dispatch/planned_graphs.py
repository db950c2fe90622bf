"""What a dry run found, as objects, text and JSON: the graphs of a function on another device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_dispatch.facts import GraphFacts
from kernel_dispatch.imagined_devices import ImaginedDevice
from kernel_dispatch.planned_kernels import PlannedKernel
from kernel_dispatch.selection import Plan
from lowering.capability import GRAPH
from lowering.contract import Region
from triton_kernels.architectures import Architecture


@dataclass
class PlannedGraph:
    """One graph: the plan, what its regions became, the kernels, and the least time it can take."""

    facts: GraphFacts
    plan: Plan
    device: ImaginedDevice
    why: str = ""  # the words of the row that was chosen for the whole graph
    regions: list[Region] = field(default_factory=list)
    kernels: list[PlannedKernel] = field(default_factory=list)
    error: str = ""
    note: str = ""  # why there is a plan and no lowered graph, where that is as it should be
    # The lowered graph on this machine: operators of ours compute their meaning in plain torch.
    run: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def architecture(self) -> Architecture | None:
        return self.device.architecture

    @property
    def least_seconds(self) -> float | None:
        """By the data sheet, of the forward, in the graph's own dtypes: all products at the full
        rate, or what goes in and out at the memory's, whichever takes longer. None: no sheet."""
        if self.architecture is None:
            return None
        rates = dict(self.architecture.flops_per_second)
        if torch.get_float32_matmul_precision() != "highest":
            rates["float32"] = rates.get("tf32", rates["float32"])
        known = [rates[dtype] for dtype in self.facts.dtypes if dtype in rates]
        arithmetic = self.facts.flops / max(known, default=rates["float32"])
        memory = self.facts.bytes_at_boundary / self.architecture.bytes_per_second
        return max(arithmetic, memory)

    def as_dict(self) -> dict[str, Any]:
        return {
            "place": self.facts.place,
            "plan": self.plan.as_dict(),
            "why": self.why,
            "regions": [
                {
                    "region": region.name,
                    "provider": region.provider,
                    "count": region.count,
                    "left": region.left,
                    "backward": region.backward,
                    "place": region.place,
                    "why": region.why,
                }
                for region in self.regions
            ],
            "kernels": [kernel.as_dict() for kernel in self.kernels],
            "flops": self.facts.flops,
            "bytes_at_boundary": self.facts.bytes_at_boundary,
            "least_seconds": self.least_seconds,
            "note": self.note,
            "error": self.error,
        }

    def lines(self, verbose: bool = False) -> Iterator[str]:
        yield self._head()
        if self.error:
            yield f"  did not lower: {self.error}"
        if self.note:
            yield f"  {self.note}"
        if self.why:
            yield f"  {self.plan.provider}: {self.why}"
        yield from (f"  {line}" for line in self._why_not())
        for region in self.regions:
            way = " (backward)" if region.backward else ""
            yield f"  {region.name} x{region.count}: {region.provider}{way}"
            yield f"    because {region.why}"
        yield from (f"  {kernel}" for kernel in self.kernels)
        for no in self.plan.rejected if verbose else ():
            who = "/".join(filter(None, (no.target, no.provider, no.region)))
            yield f"  not {who}: {'; '.join(reason.text for reason in no.reasons)}"

    def _head(self) -> str:
        forward = " forward" if self.facts.training else ""
        text = (
            f"graph at {self.facts.place or '?'}: target {self.plan.target}, provider "
            f"{self.plan.provider}; {self.facts.flops / 1e9:.3g} GFLOP{forward}, "
            f"{self.facts.bytes_at_boundary / 1e6:.3g} MB in and out"
        )
        if self.architecture is None or self.least_seconds is None:
            return text
        return f"{text}, at least {self.least_seconds * 1e6:.3g} us on a {self.architecture.card}"

    def _why_not(self) -> Iterator[str]:
        """What the providers of whole graphs said, where none of the device's takes this one."""
        name = self.device.target.name
        if self.plan.provider != "eager" and self.plan.target == name:
            return
        for no in self.plan.rejected:
            if no.target == name and no.region == GRAPH:
                texts = "; ".join(reason.text for reason in no.reasons)
                yield f"not by {no.provider or no.target}: {texts}"


@dataclass
class DryRun:
    """Every graph of a function, as it would be on that device."""

    device: str
    level: str
    graphs: list[PlannedGraph]
    notes: list[str] = field(default_factory=list)  # why there is no graph, or more than one
    absent: str = ""  # why the device is not on this machine; empty: it is
    features: tuple[str, ...] = ()  # what the device was taken to have

    @property
    def complete(self) -> bool:
        """Every graph was planned without an error, and every kernel compiled."""
        errors = [graph.error for graph in self.graphs]
        errors += [kernel.error for graph in self.graphs for kernel in graph.kernels]
        return bool(self.graphs) and not any(errors)

    def regions(self) -> dict[tuple[str, str], int]:
        """(region, provider) -> how many, over all graphs, forward and backward."""
        found: dict[tuple[str, str], int] = {}
        for graph in self.graphs:
            for region in graph.regions:
                key = (region.name, region.provider)
                found[key] = found.get(key, 0) + region.count
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "absent": self.absent,
            "features": list(self.features),
            "level": self.level,
            "graphs": [graph.as_dict() for graph in self.graphs],
            "notes": self.notes,
        }

    def json(self, indent: int | None = 2) -> str:
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def text(self, verbose: bool = False) -> str:
        count = len(self.graphs)
        where = f"which is not here ({self.absent})" if self.absent else "and nothing ran there"
        head = [
            f"dry run for {self.device} at {self.level}, {where}: {count} graph{'s' * (count != 1)}"
        ]
        if self.features:
            head.append(f"taken to have: {', '.join(self.features)}")
        graphs = (line for graph in self.graphs for line in graph.lines(verbose))
        return "\n".join([*head, *graphs, *self.notes])

    def __str__(self) -> str:
        return self.text()

    def emit(self, folder: str | Path) -> list[Path]:
        """Write the code of every kernel: PTX and cubin, or AMD assembly and hsaco."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        written = []
        seen: dict[int, str] = {}
        for kernel in (kernel for graph in self.graphs for kernel in graph.kernels):
            binary = kernel.binary
            if binary is None or id(binary) in seen:
                continue
            name = seen[id(binary)] = f"{kernel.launch.name}_{len(seen)}"
            text, code = path / (name + binary.suffix), path / (name + binary.code_suffix)
            text.write_text(binary.assembly)
            code.write_bytes(binary.code)
            written += [text, code]
        return written
