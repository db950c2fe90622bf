"""What would happen on a GPU that is not here: the plan, its regions, the kernels and what the real
compiler says of them.

The function runs once as it is, on whatever device its tensors are. Every graph that Dynamo
captures on the way is planned and lowered for the other device, and no code of it is run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kernel_dispatch import dynamo
from kernel_dispatch.explaining import Explanation, compiled_apart, uncompiled, watching
from kernel_dispatch.facts import GraphFacts, collect
from kernel_dispatch.selection import Machine, Plan, plan
from kernel_dispatch.settings import Settings, resolve
from lowering import providers, targets
from lowering.contract import Probe, Region, Request, Target
from lowering.errors import SettingError, nearest
from lowering.graphs import clone, hint
from lowering.targets.gpu import features_of
from triton_kernels import architectures, cross_compiling
from triton_kernels.architectures import Architecture
from triton_kernels.cross_compiling import Binary
from triton_kernels.launching import Launch

_TARGETS = {"cuda": "cuda", "hip": "rocm"}


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


@dataclass
class PlannedGraph:
    """One graph: the plan, what its regions became, the kernels, and the least time it can take."""

    facts: GraphFacts
    plan: Plan
    architecture: Architecture
    regions: list[Region] = field(default_factory=list)
    kernels: list[PlannedKernel] = field(default_factory=list)
    error: str = ""
    # The lowered graph on this machine: operators of ours compute their meaning in plain torch.
    run: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def least_seconds(self) -> float:
        """By the data sheet, of the forward, in the graph's own dtypes: all products at the full
        rate, or what goes in and out at the memory's, whichever takes longer."""
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
            "error": self.error,
        }

    def lines(self, verbose: bool = False) -> Iterator[str]:
        forward = " forward" if self.facts.training else ""
        yield (
            f"graph at {self.facts.place or '?'}: target {self.plan.target}, provider "
            f"{self.plan.provider}; {self.facts.flops / 1e9:.3g} GFLOP{forward}, "
            f"{self.facts.bytes_at_boundary / 1e6:.3g} MB in and out, at least "
            f"{self.least_seconds * 1e6:.3g} us on a {self.architecture.card}"
        )
        if self.error:
            yield f"  did not lower: {self.error}"
        for region in self.regions:
            way = " (backward)" if region.backward else ""
            yield f"  {region.name} x{region.count}: {region.provider}{way}"
            yield f"    because {region.why}"
        yield from (f"  {kernel}" for kernel in self.kernels)
        for no in self.plan.rejected if verbose else ():
            who = "/".join(filter(None, (no.target, no.provider, no.region)))
            yield f"  not {who}: {'; '.join(reason.text for reason in no.reasons)}"


@dataclass
class DryRun:
    """Every graph of a function, as it would be on that device."""

    device: str
    level: str
    graphs: list[PlannedGraph]
    notes: list[str] = field(default_factory=list)  # why there is no graph, or more than one

    @property
    def complete(self) -> bool:
        """Every graph was lowered, and every kernel compiled."""
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
        graphs = [graph.as_dict() for graph in self.graphs]
        return {"device": self.device, "level": self.level, "graphs": graphs, "notes": self.notes}

    def json(self, indent: int | None = 2) -> str:
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def text(self, verbose: bool = False) -> str:
        count = len(self.graphs)
        head = f"dry run for {self.device} at {self.level}: {count} graph{'s' * (count != 1)}"
        graphs = (line for graph in self.graphs for line in graph.lines(verbose))
        return "\n".join([head, *graphs, *self.notes])

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


def dry_run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str,
    options: Mapping[str, Any] | None = None,
) -> DryRun:
    """What `torch.compile(fn, backend="unified")` would do on `device`, such as "cuda:sm90".

    `fn` is called once with the arguments, on the devices where they are: tensors of the device
    "meta" cost neither memory nor time. `options` are those of torch.compile.
    """
    architecture = parse_device(device)
    if not callable(fn) or isinstance(args, torch.Tensor):
        given = "a tensor as args" if callable(fn) else repr(fn)
        raise SettingError(f"dry_run takes a function and a tuple of its arguments, not {given}.")
    settings = resolve(None, options)
    run = DryRun(architecture.device, str(settings.level), [])

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        run.graphs.append(planned(gm, example_inputs, settings, architecture))
        return gm.forward

    with (
        architectures.assume(architecture),  # calls of our kernels stay calls
        torch.random.fork_rng(devices=[]),
        watching() as watched,
        uncompiled(fn),
    ):
        compiled_apart(fn, backend)(*args, **(kwargs or {}))
    run.notes = _notes(watched.explanation(), bool(run.graphs))
    return run


def _notes(told: Explanation, any_graph: bool) -> list[str]:
    breaks = [f"graph break: {reason}" for reason in told.graph_breaks]
    skipped = [f"skipped: {reason}" for reason in told.skipped]
    never = [] if any_graph or told.never_called is None else [str(told.never_called)]
    return [*never, *breaks, *skipped]


def parse_device(device: str) -> Architecture:
    """The architecture in "cuda:sm90" or "rocm:gfx942"."""
    device = str(device)
    named = {one.device: one for one in architectures.KNOWN}
    wanted = device.lower()
    alias, _, name = wanted.partition(":")
    wanted = f"{targets.resolve_name(alias) or alias}:{name}"
    if wanted not in named:
        near = nearest(wanted, named)
        hint_ = f" Did you mean {near!r}?" if near else ""
        known = ", ".join(named)
        raise SettingError(f"device={device!r} names no architecture: one of {known}.{hint_}")
    return named[wanted]


def is_architecture(device: str) -> bool:
    """Is this a device with its architecture, and not with a number?"""
    _, _, name = device.partition(":")
    return bool(name) and not name.isdigit()


def planned(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    architecture: Architecture,
) -> PlannedGraph:
    """One graph of Dynamo's, planned and lowered."""
    target = _TARGETS[architecture.backend]
    facts = _on(collect(gm, example_inputs), torch_device="cuda")
    chosen = plan(facts, replace(settings, device=None), _machine(target, architecture))
    found = PlannedGraph(facts, chosen, architecture)
    lowered: list[tuple[fx.GraphModule, bool]] = []
    request = _request(gm, example_inputs, settings, facts, chosen)
    request = replace(
        request, only_plan=lambda module, backward: lowered.append((module, backward))
    )
    compile_graph = providers.get(chosen.provider).compile
    assert compile_graph is not None
    try:
        with architectures.assume(architecture), _backward_at_once():
            compiled = compile_graph(request)
            found.regions, found.run = compiled.regions, compiled.run
            found.kernels = _kernels([module for module, _ in lowered], architecture)
    except dynamo.control_flow_errors():
        raise
    except Exception as error:  # noqa: BLE001  (the plan stands; what could not be lowered is told)
        found.error = f"{type(error).__name__}: {error}"
    return found


def _on(facts: GraphFacts, torch_device: str) -> GraphFacts:
    inputs = tuple(replace(fact, device=torch_device) for fact in facts.inputs)
    return replace(facts, devices=(torch_device,), inputs=inputs)


def _machine(target: str, architecture: Architecture) -> Machine:
    """One with that device, and with everything installed that its providers need."""
    there = Probe.yes(architecture.card, features=sorted(features_of(architecture.name)))

    def probe(other: Target) -> Probe:
        return (
            there if other.name == target else Probe.no(f"this plan is for {architecture.device}")
        )

    return Machine(targets.known(), probe, lambda provider: "")


def _request(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    facts: GraphFacts,
    chosen: Plan,
) -> Request:
    graph = clone(gm)
    return Request(
        graph=graph,
        example_inputs=_off_meta(graph, example_inputs),
        level=settings.level,
        training=facts.training,
        region_rows=chosen.region_rows,
        mode=settings.mode,
    )


def _off_meta(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Fake CPU tensors for those of the device "meta", which torch's passes do not expect."""

    def moved(value: Any) -> Any:
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value

    for node in gm.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    gm.recompile()
    mode = torch._guards.detect_fake_mode(list(example_inputs)) or _fake_mode_of(gm)
    return [_on_cpu(value, mode) for value in example_inputs]


def _fake_mode_of(gm: fx.GraphModule) -> Any:
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    return torch._guards.detect_fake_mode(values)


def _on_cpu(value: Any, mode: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "meta" or mode is None:
        return value
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake.requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _backward_at_once() -> Iterator[None]:
    """Nobody will call backward(): it is traced and lowered with the forward."""
    import torch._functorch.config as functorch

    lazy = "force_non_lazy_backward_lowering"
    with functorch.patch({lazy: True}) if hasattr(functorch, lazy) else contextlib.nullcontext():
        yield


def _kernels(modules: Sequence[fx.GraphModule], architecture: Architecture) -> list[PlannedKernel]:
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
