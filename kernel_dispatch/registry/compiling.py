"""`Provider.compile`: the unified backend with this provider chosen, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kernel_dispatch import devices
from kernel_dispatch.explaining import unified_apart
from kernel_dispatch.registry import availability, policy
from kernel_dispatch.registry.interface import CompileContext
from kernel_dispatch.reporting import GraphReport, Report, report
from kernel_dispatch.settings import resolve
from lowering.errors import BackendNotAvailableError, SettingError

if TYPE_CHECKING:
    from kernel_dispatch.registry.provider import Provider


def compile(provider: Provider, ctx: CompileContext) -> bool:
    """True if there is something to call. A mistake in the request itself raises."""
    _check(ctx)
    ctx.compiled, ctx.report, ctx.taken, ctx.notes, ctx.error = None, None, (), (), None
    if why := provider.reason:
        name = provider.info.name
        ctx.error = BackendNotAvailableError(f"provider {name!r} cannot be used here: {why}.")
        return False
    options = _options(provider, ctx)
    resolve(None, options)
    compiled: Any = unified_apart(ctx.model, {"options": options})
    run = _in_grad_mode(compiled, ctx.training)
    try:
        _call(run, ctx.example_inputs)
    except Exception as error:  # noqa: BLE001  (a source that fails is an answer, and it is kept)
        ctx.error = error
        return False
    graphs = report(compiled)
    ctx.compiled, ctx.report = run, graphs
    ctx.taken = tuple(_taken(provider, graphs))
    ctx.notes = tuple(dict.fromkeys(_notes(provider, graphs, ctx.taken)))
    return True


def _check(ctx: object) -> None:
    if not isinstance(ctx, CompileContext):
        raise TypeError(f"compile() takes a CompileContext, not {ctx!r}")
    if not callable(ctx.model):
        raise TypeError(f"CompileContext.model is {ctx.model!r}: give a module or a function")
    if isinstance(ctx.example_inputs, (torch.Tensor, str)) or not isinstance(
        ctx.example_inputs, (Sequence, Mapping)
    ):
        kind = type(ctx.example_inputs).__name__
        raise TypeError(f"CompileContext.example_inputs is a {kind}: give a tuple or a dict")
    if not isinstance(ctx.options, Mapping):
        raise SettingError(f"CompileContext.options is {ctx.options!r}: give a dict of options.")


def _options(provider: Provider, ctx: CompileContext) -> dict[str, Any]:
    """The user's own come last, so that they win."""
    options: dict[str, Any] = {
        "provider": provider.info.name,
        "device": _target_for(provider, ctx),
        "level": ctx.level,
    }
    if ctx.num_workers is not None:
        options["threads"] = ctx.num_workers
    return {**options, **ctx.options}


def _target_for(provider: Provider, ctx: CompileContext) -> str:
    """Of several targets that are here, the one where the tensors are."""
    machine, config = devices.this_machine(), resolve().config
    kinds = {tensor.device.type for tensor in _tensors(ctx)}
    here = availability.targets_of(provider.info, machine, config)
    holding = [target for target in here if kinds and kinds <= set(target.device_types)]
    return (holding or here)[0].name


def _tensors(ctx: CompileContext) -> Iterable[torch.Tensor]:
    given = ctx.example_inputs
    values = given.values() if isinstance(given, Mapping) else given
    yield from (value for value in values if isinstance(value, torch.Tensor))
    if isinstance(ctx.model, torch.nn.Module):
        yield from ctx.model.parameters()


def _in_grad_mode(compiled: Callable[..., Any], training: bool) -> Callable[..., Any]:
    """In the other mode Dynamo would compile anew, and for training most providers take nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(training):
            return compiled(*args, **kwargs)

    run.__wrapped__ = compiled  # type: ignore[attr-defined]  # for kernel_dispatch.report(run)
    return run


def _call(compiled: Callable[..., Any], inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
    return compiled(**inputs) if isinstance(inputs, Mapping) else compiled(*inputs)


def _taken(provider: Provider, graphs: Report) -> Iterable[str]:
    """ "region:provider" of everything that ran, or that its library computes unasked."""
    apart = policy.stands_apart(provider.info)
    for graph in graphs:
        if graph.target not in provider.info.targets:
            continue
        silent = {(part.name, part.provider) for part in graph.regions if part.silent}
        for row in graph.as_dict()["regions"]:
            who = (row["region"], row["provider"])
            ran = row["runs"] is None or row["runs"] > 0 or who in silent
            mine = row["provider"] in provider.info.providers or not apart
            if row["provider"] != "eager" and mine and ran:
                yield ":".join(who)


def _notes(provider: Provider, graphs: Report, taken: Sequence[str]) -> Iterable[str]:
    for graph in graphs:
        yield from (str(fallback.reason) for fallback in graph.fallbacks)
        yield from graph.notes
    if taken:
        return
    yield f"{provider.info.name} computed nothing of it: what it takes is in docs/providers.md"
    if not graphs:
        yield "Dynamo handed no graph to the backend (kernel_dispatch.explain tells why)"
    for graph in graphs:
        yield from _refusals(provider, graph)


def _refusals(provider: Provider, graph: GraphReport) -> Iterable[str]:
    """Why the plan left this provider out."""
    names = set(provider.info.providers)
    for no in graph.plan.rejected:
        concerned = no.provider in names or (not names and no.provider not in ("", "eager"))
        if no.target in provider.info.targets and (concerned or not no.provider):
            yield f"{no.region}: " + "; ".join(map(str, no.reasons))
