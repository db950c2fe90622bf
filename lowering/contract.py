"""The words that the rooms share: Probe, Provider, Target, Request, Compiled.

`lowering` never imports `kernel_dispatch`. What it has to be told (level, permitted providers,
threads) arrives as a `Request`; what it has to tell goes back as a `Compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from lowering.capability import CapabilityRow
from lowering.errors import RegistrationError
from lowering.levels import Level
from lowering.reasons import Reason
from lowering.regions.epilogue import NO_ABILITIES, Abilities, Epilogue


@dataclass(frozen=True)
class Probe:
    """The answer to "is it here and does it work", with the sentence why not."""

    available: bool
    reason: str = ""
    version: str = ""
    fix: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def yes(cls, version: str = "", **details: Any) -> Probe:
        return cls(True, "", version, "", details)

    @classmethod
    def no(cls, reason: str, fix: str = "", **details: Any) -> Probe:
        return cls(False, reason, "", fix, details)


class Graph(Protocol):
    """A compiled graph: called with the graph's inputs, returns the tuple of its outputs."""

    def __call__(self, *args: Any) -> Any: ...


@dataclass
class Region:
    """A hot subgraph that a provider took, as it stands in the report."""

    name: str
    provider: str
    count: int
    place: str = ""
    detail: str = ""
    recipes: tuple[str, ...] = ()  # what was done to its weights, once
    packed_bytes: int = 0  # what the weights' other form costs, beside the originals
    backward: bool = False  # autograd calls it, outside of the graph's own calls: not counted
    why: str = ""  # the rows' own words
    left: bool = False  # matched, and left as it stands to the provider: nothing counts its runs
    silent: bool = False  # no operator tells that it ran: it does whenever the graph does

    def one_more(self, why: str) -> None:
        """Regions of one provider may have been taken by several of its rows."""
        self.count += 1
        if why not in self.why:
            self.why = "; ".join(filter(None, (self.why, why)))


@dataclass(frozen=True)
class Request:
    """One graph for one provider on one target. The graph is ours: the caller's stays untouched."""

    graph: fx.GraphModule
    example_inputs: Sequence[Any]
    level: Level
    training: bool
    region_rows: tuple[CapabilityRow, ...] = ()
    # (region, dtype, shape class) -> providers, fastest first, where the machine was measured
    ranking: Mapping[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    mode: str | None = None
    threads: int | None = None
    target_config: Mapping[str, Any] = field(default_factory=dict)  # Target.inductor_config
    inductor_config: Mapping[str, Any] = field(default_factory=dict)  # the user's own
    # Called when a part that is compiled later (a backward) fails; eager then computes that part.
    failed_later: Callable[[Exception], None] | None = None
    # Called when an operator of the graph turns out to be one that the provider does not have.
    left_to_eager: Callable[[Reason], None] = lambda reason: None
    # Called with what the report should have as a note: it was done, but not as it was asked for.
    noted: Callable[[Reason], None] = lambda reason: None
    # For providers that move tensors themselves: the device, which placeholders are parameters or
    # buffers (they stay there), and who counts what was moved.
    move_to: str | None = None
    stays: tuple[int, ...] = ()
    transferred: Callable[[int], None] = lambda count: None
    buckets: tuple[int, ...] | None = None  # sizes to round dynamic ones up to; (): our own choice
    cache_folder: str | None = None
    dump_folder: str | None = None  # where to write the lowered graphs, for debugging
    # Called with each lowered graph in place of code generation, and whether it is a backward: for
    # plans of an absent device.
    only_plan: Callable[[fx.GraphModule, bool], None] | None = None


@dataclass
class Compiled:
    """What a provider hands back: the callable, and what is known of it."""

    run: Graph
    plain: bool = False  # the untouched graph, run by torch itself: nothing to fall back from
    regions: list[Region] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class CompileFn(Protocol):
    def __call__(self, request: Request) -> Compiled: ...


@dataclass(frozen=True)
class RegionMaker:
    """How a provider computes one kind of region: the node that stands for a match."""

    # (graph, match, what was absorbed behind it) -> the node whose value replaces the region's, or
    # {new: old} for a region with several results. None: the region stays as it stands, which is
    # how this provider gets it.
    emit: Callable[[fx.Graph, Any, Epilogue], fx.Node | dict[fx.Node, fx.Node]] | None
    abilities: Abilities = NO_ABILITIES
    refuses: Callable[[Any], str] = lambda match: ""  # what a row cannot say; empty: takes it
    # Why it would gain nothing over what stands there. Not asked of who was chosen by name.
    declines: Callable[[Any], str] = lambda match: ""
    describe: Callable[[Sequence[Any]], str] = lambda matches: ""  # for the report
    silent: bool = False  # its operators do not tell that they ran
    # Bytes of a packed weight's element; 0: never packed.
    packed_element: Callable[[Any], int] = lambda match: match.dtype.itemsize
    # What a weight becomes beside being packed, by its name in the documentation, and how many
    # times as many values it has then.
    transforms: Callable[[Any], tuple[str, float]] = lambda match: ("", 1.0)


@dataclass(frozen=True)
class Provider:
    """Who computes: a probe that imports and tries; a compile function for whole graphs, and what
    it makes of regions."""

    name: str
    summary: str
    probe: Callable[[], Probe]
    compile: CompileFn | None = None
    requires: tuple[str, ...] = ()
    regions: Mapping[str, RegionMaker] = field(default_factory=dict)
    early_regions: Mapping[str, RegionMaker] = field(default_factory=dict)  # before autograd
    moves: bool = False  # compile() takes tensors of another device to its own, and results home
    plans: bool = False  # compile() honours Request.only_plan: nothing of the vendor is started


@dataclass(frozen=True)
class Target:
    """Where a graph runs. One record and one file each; validated when it is built."""

    name: str
    summary: str
    device_types: tuple[str, ...]
    probe: Callable[[], Probe]
    rows: tuple[CapabilityRow, ...]
    aliases: tuple[str, ...] = ()
    priority: int = 0
    extra: str = ""
    proven_on: str = ""
    providers: tuple[Provider, ...] = ()
    # Config of Inductor that this target wants at a level; plain data.
    inductor_config: Callable[[Level], Mapping[str, Any]] | None = None
    # How a forced device gets and gives back tensors; None means torch's own `Tensor.to`.
    to_target: Callable[[torch.Tensor], torch.Tensor] | None = None
    from_target: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = None
    # Machines of this kind that a dry run can name: variant -> the details that the probe would
    # give there. The first one stands for the target's bare name.
    on_paper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise RegistrationError(f"a target's name is a lower-case word, not {self.name!r}")
        if not self.device_types:
            raise RegistrationError(f"target {self.name!r} names no torch device type")
        for row in self.rows:
            if row.target != self.name:
                raise RegistrationError(
                    f"target {self.name!r} carries a capability row of {row.target!r}"
                )
