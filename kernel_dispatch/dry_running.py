"""What would happen on a device that is not here: the plan, its regions, and, for GPUs, the kernels
and what the real compiler says of them.

The function runs once as it is, on whatever device its tensors are. Every graph that Dynamo
captures on the way is planned and lowered for the other device, and no code of it is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from kernel_dispatch import dynamo
from kernel_dispatch.backend import unified
from kernel_dispatch.explaining import Explanation, compiled_apart, uncompiled, watching
from kernel_dispatch.facts import GraphFacts, collect
from kernel_dispatch.imagined_devices import ImaginedDevice, parse_device
from kernel_dispatch.options import DeviceWish
from kernel_dispatch.planned_graphs import DryRun, PlannedGraph
from kernel_dispatch.planned_kernels import kernels_of
from kernel_dispatch.selection import Plan, plan
from kernel_dispatch.settings import Settings, resolve
from lowering import providers, targets
from lowering.capability import GRAPH, Situation, check
from lowering.contract import Request
from lowering.errors import SettingError
from lowering.graphs import capture_of, clone
from triton_kernels import architectures


def dry_run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str,
    options: Mapping[str, Any] | None = None,
) -> DryRun:
    """What `torch.compile(fn, backend="unified")` would do on `device`: "cuda:sm90", "mps" ...

    `fn` is called once with the arguments, on the devices where they are: tensors of the device
    "meta" cost neither memory nor time. `options` are those of torch.compile.
    """
    imagined = parse_device(device)
    if not callable(fn) or isinstance(args, torch.Tensor):
        given = "a tensor as args" if callable(fn) else repr(fn)
        raise SettingError(f"dry_run takes a function and a tuple of its arguments, not {given}.")
    settings = resolve(None, options)
    told = DryRun(
        imagined.name,
        str(settings.level),
        [],
        absent=imagined.absent,
        features=imagined.features,
    )

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        told.graphs.append(planned(gm, example_inputs, settings, imagined))
        return gm.forward

    _stand_for_unified(backend, {**(options or {}), "device": imagined.target.name})
    with (
        _assumed(imagined),  # calls of our kernels stay calls
        torch.random.fork_rng(devices=[]),
        watching() as watched,
        uncompiled(fn),
    ):
        compiled_apart(fn, backend)(*args, **(kwargs or {}))
    told.notes = _notes(watched.explanation(), bool(told.graphs))
    return told


def _stand_for_unified(backend: Any, options: Mapping[str, Any]) -> None:
    """What is captured for `unified` with these options is captured for it too."""
    backend.__wrapped__, backend.kwargs = unified, {"options": options}


def _assumed(device: ImaginedDevice) -> contextlib.AbstractContextManager[None]:
    if device.architecture is None:
        return contextlib.nullcontext()
    return architectures.assume(device.architecture)


def _notes(told: Explanation, any_graph: bool) -> list[str]:
    breaks = [f"graph break: {reason}" for reason in told.graph_breaks]
    skipped = [f"skipped: {reason}" for reason in told.skipped]
    never = [] if any_graph or told.never_called is None else [str(told.never_called)]
    return [*never, *breaks, *skipped]


def planned(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    device: ImaginedDevice,
) -> PlannedGraph:
    """One graph of Dynamo's, planned and lowered."""
    facts = _on(collect(gm, example_inputs), device.torch_device)
    wish = DeviceWish(device.target.name) if device.forced else None
    chosen = plan(facts, replace(settings, device=wish), device.machine())
    found = PlannedGraph(facts, chosen, device, _why(chosen, facts, settings, device))
    try:
        with capture_of(gm):
            _lower(found, _request(gm, example_inputs, settings, facts, chosen))
    except dynamo.control_flow_errors():
        raise
    except Exception as error:  # noqa: BLE001  (the plan stands; what could not be lowered is told)
        found.error = f"{type(error).__name__}: {error}"
    return found


def _why(chosen: Plan, facts: GraphFacts, settings: Settings, device: ImaginedDevice) -> str:
    """The words of the row that took the whole graph."""
    target = targets.find(chosen.target)
    situation = Situation(settings.level, frozenset(device.features), tolerance=settings.tolerance)
    rows = sorted(target.rows if target is not None else (), key=lambda row: -row.priority)
    for row in rows:
        takes = (row.region, row.provider) == (GRAPH, chosen.provider)
        if takes and not check(row, facts.work(), situation):
            return row.why
    return ""


def _lower(found: PlannedGraph, request: Request) -> None:
    """Through the provider's own passes, where these can do without the device."""
    provider = providers.get(found.plan.provider)
    if provider.compile is None or not provider.plans:
        found.note = f"how {provider.name} divides the graph is known where it runs, not here"
        return
    lowered: list[tuple[fx.GraphModule, bool]] = []
    request = replace(
        request, only_plan=lambda module, backward: lowered.append((module, backward))
    )
    with _assumed(found.device), _backward_at_once():
        compiled = provider.compile(request)
        found.regions, found.run = compiled.regions, compiled.run
        if request.training and not _can_lower_backward():
            found.note = "the forward only: what computes the backward is known when it is called"
        if found.architecture is not None:
            modules = [module for module, _ in lowered]
            found.kernels = kernels_of(modules, found.architecture)


def _on(facts: GraphFacts, torch_device: str) -> GraphFacts:
    inputs = tuple(replace(fact, device=torch_device) for fact in facts.inputs)
    return replace(facts, devices=(torch_device,), inputs=inputs)


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

    with functorch.patch({_LAZY: True}) if _can_lower_backward() else contextlib.nullcontext():
        yield


_LAZY = "force_non_lazy_backward_lowering"


def _can_lower_backward() -> bool:
    import torch._functorch.config as functorch

    return hasattr(functorch, _LAZY)
