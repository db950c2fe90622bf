"""What `unified` does with a graph, in named stages: settings, facts, plan, compile, guard."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from kernel_dispatch import (
    caches,
    calibration,
    debug,
    devices,
    dynamo,
    kept_memory,
    pinned_guards,
    placement,
    reporting,
)
from kernel_dispatch.callables import origin
from kernel_dispatch.facts import GraphFacts, collect, nothing_known
from kernel_dispatch.guard import Guard
from kernel_dispatch.registry import policy
from kernel_dispatch.reporting import GraphReport
from kernel_dispatch.selection import Plan, plan
from kernel_dispatch.settings import Settings, resolve
from kernel_dispatch.sleeping_threads import waking_threads
from kernel_dispatch.thread_count import with_threads
from lowering import layouts, machine, packing, providers, ranking, targets, without_compiler
from lowering.contract import Compiled, Graph, Request
from lowering.errors import UnifiedError, UnifiedWarning
from lowering.graphs import capture_of, clone, first_place, lean
from lowering.levels import Level
from lowering.native import library
from lowering.prior import prior
from lowering.reasons import Reason
from triton_kernels import tuning

log = logging.getLogger(__name__)

# Inductor's config patches are scoped but global, so two compilations must not interleave.
_compiling = threading.RLock()


def _renew_lock() -> None:
    """A child forked while another thread compiles would wait for that thread for ever."""
    global _compiling
    _compiling = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    unknown_kwargs: Mapping[str, Any],
) -> Graph:
    """One graph, as torch hands it over."""
    try:
        settings = resolve(mode, options)
        with _compiling, dynamo.calls_of_other_threads():
            return _pipeline_or_eager(gm, example_inputs, settings, unknown_kwargs)
    except UnifiedError as error:
        raise dynamo.visible(error) from None


def forget() -> None:
    """Forget graphs and what was asked of the machine."""
    reporting.clear()
    devices.forget()
    packing.forget()


def _pipeline_or_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    unknown_kwargs: Mapping[str, Any],
) -> Graph:
    """A bug of ours must not stop the user: then the graph runs as Dynamo captured it."""
    untouched = _uncompiled(gm)
    try:
        return _pipeline(gm, example_inputs, settings, unknown_kwargs)
    except (UnifiedError, UnifiedWarning):
        raise
    except Exception as error:
        if dynamo.minifying() or isinstance(error, dynamo.control_flow_errors()):
            raise
        facts = nothing_known(first_place(gm))
        chosen = Plan("none", ("eager",), (), ())
        record = _open(gm, settings, facts, chosen, {}, unknown_kwargs)
        reason = Reason("internal-error", str(error) or repr(error), facts.place)
        log.info("a bug of kernel_dispatch", exc_info=True)
        reporting.fell_back(record, "plan", "unified", "eager", reason, error)
        return Guard(record, untouched, untouched)


def _uncompiled(gm: fx.GraphModule) -> Graph:
    return lean(without_compiler.prepare(clone(gm))).forward


def _pipeline(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    unknown_kwargs: Mapping[str, Any],
) -> Graph:
    seconds: dict[str, float] = {}
    library.keep_in(settings.cache_folder)
    tuning.keep_in(settings.cache_folder)
    with _timed("facts", seconds):
        facts = collect(gm, example_inputs)
    with _timed("plan", seconds):
        chosen = plan(facts, settings, devices.this_machine())
    record = _open(gm, settings, facts, chosen, seconds, unknown_kwargs)
    if library.failure() and not settings.disable & {"openmp", "mha"}:
        reporting.missing_kernels(record, library.failure())
    eager = with_threads(_uncompiled(gm), settings.threads)
    try:
        with _timed("compile", seconds), caches.observed(record.cache):
            record.provider, compiled = _compile(gm, example_inputs, record)
    except dynamo.control_flow_errors():
        reporting.withdraw(record)  # Dynamo starts over and comes back with another graph
        raise
    record.regions = compiled.regions
    record.notes += compiled.notes
    if chosen.region_rows:
        kept_memory.arrange(settings, facts.training)
    debug.trace(gm, record)
    log.info("%s", record)
    run = waking_threads(compiled.run, record.target, facts)
    if settings.guards == "pinned":
        pinned_guards.wanted(record)
    return Guard(
        record,
        eager if compiled.plain else with_threads(run, settings.threads),
        eager,
        written=facts.written_inputs,
        written_unknown=dynamo.writes_inputs() and not facts.written_inputs,
    )


@contextlib.contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - start


def _open(
    gm: fx.GraphModule,
    settings: Settings,
    facts: GraphFacts,
    chosen: Plan,
    seconds: dict[str, float],
    unknown_kwargs: Mapping[str, Any],
) -> GraphReport:
    """Start the graph's record, and say at once what is already known to fall short."""
    wrapped, function = dynamo.owner()
    owner = origin(wrapped)
    shared = function.startswith("wrap_inline")  # torch's stand-in for forwards of its own modules
    if shared:
        function = type(owner).__name__
    compile_id, version = dynamo.compile_id()
    record = reporting.open_record(
        owner=owner,
        compile_id=compile_id,
        function=str(unknown_kwargs.get("name") or function),
        settings=settings,
        facts=facts,
        plan=chosen,
        graph_break=dynamo.graph_break(gm),
        recompile_reason=dynamo.recompile_reason() if version else "",
        provider=chosen.provider,
        seconds=seconds,
    )
    for name in sorted(set(unknown_kwargs) - {"name"}):
        record.notes.append(str(Reason("unexpected-kwargs", f"torch passed {name}=, not used")))
    record.notes += layouts.copies_in(gm.graph)
    _say_what_falls_short(record)
    _say_what_comes_near(record, version, shared)
    return record


def _say_what_falls_short(record: GraphReport) -> None:
    chosen = record.plan
    for reason in chosen.refused_wish[:1]:
        wish = str(record.settings.device)
        reporting.fell_back(record, "plan", wish, f"{chosen.target}/{chosen.provider}", reason)
    for reason in chosen.missing:
        reporting.fell_back(record, "plan", reason.text.split(":")[0], chosen.provider, reason)


def _say_what_comes_near(record: GraphReport, version: int, shared: bool) -> None:
    """Dynamo's recompile limit, of this function or of all modules that share a stand-in."""
    limit = dynamo.recompile_limit()
    if limit is None or not version or dynamo.versions() != limit:
        return
    if shared:
        # Nothing is wrong with this module, so this is no warning: others came before it.
        text = (
            f"{record.function} is a class of torch's own, and torch counts the compilations of "
            f"all such modules together: {limit} were made, which is Dynamo's recompile limit, and "
            f"the next one runs uncompiled. Put them into a module of yours, call "
            f"torch.compiler.reset(), or raise torch._dynamo.config.recompile_limit."
        )
        record.notes.append(str(Reason("recompile-limit", text, record.place)))
        log.warning("%s", text)
        return
    at = f" ({record.place})" if record.place else ""
    text = (
        f"{record.function}{at} has been compiled {limit} times, which is "
        f"Dynamo's recompile limit: one more change and it runs uncompiled. The failing guard: "
        f"{record.recompile_reason or 'unknown'}. Use dynamic=True, or raise "
        f"torch._dynamo.config.recompile_limit."
    )
    reporting.warn_once(record, Reason("recompile-limit", text, record.place))


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], record: GraphReport
) -> tuple[str, Compiled]:
    moves_itself = providers.get(record.plan.provider).moves
    if record.plan.move_to is not None and not moves_itself:
        moved = placement.place(gm, record, _compile_on_target)
        return record.plan.provider, Compiled(run=moved)
    return _compile_on_target(gm, example_inputs, record)


def _compile_on_target(
    gm: fx.GraphModule, example_inputs: Sequence[Any], record: GraphReport
) -> tuple[str, Compiled]:
    names = record.plan.providers
    for position, name in enumerate(names):
        provider = providers.get(name)
        assert provider.compile is not None, f"{name} has a whole-graph row and no compile()"
        try:
            with capture_of(gm):
                return name, provider.compile(_request(clone(gm), example_inputs, record))
        except dynamo.control_flow_errors():
            raise
        except Exception as error:
            if dynamo.minifying():
                raise
            following = names[position + 1] if position + 1 < len(names) else "eager"
            reason = Reason("compile-failed", str(error) or repr(error), record.place)
            reporting.fell_back(record, "compile", name, following, reason, error)
    return "eager", Compiled(run=_uncompiled(gm), plain=True)


def _left_to_eager(record: GraphReport, reason: Reason) -> None:
    """An operator that the provider turned out not to have."""
    reporting.fell_back(record, "compile", record.provider, "eager", reason)


def _transferred(record: GraphReport, count: int) -> None:
    record.transfers += count


def _backward_failed(record: GraphReport, error: Exception) -> None:
    """AOTAutograd compiles a backward when it is first needed, long after the plan's providers."""
    reason = Reason("compile-failed", f"the backward: {error}", record.place)
    reporting.fell_back(record, "compile", record.provider, "eager", reason, error)


# Below it, the difference between two libraries is no reason to stop for a measurement.
_WORTH_MEASURING_FLOPS = 100_000_000


def _ranking(record: GraphReport) -> ranking.Orders:
    """Who is fast here: measured once, where graphs are worth it; else as expected of the CPU."""
    rows, settings = record.plan.region_rows, record.settings
    if not rows or record.facts.training or record.target != "cpu":
        return {}
    if policy.effect(settings.provider, record.target):
        return {}  # one was chosen: who is faster is not the question
    worth = settings.level >= Level.O2 and record.facts.work().flops >= _WORTH_MEASURING_FLOPS
    rates = calibration.current(settings, auto=worth) or prior(machine.cpu())
    return ranking.orders(rates, rows)


def _resident(gm: fx.GraphModule, facts: GraphFacts) -> tuple[int, ...]:
    """Which of the graph's arguments are parameters or buffers."""
    names = {fact.name for fact in facts.inputs if fact.kind != "input"}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(placeholders) if node.name in names)


def _request(gm: fx.GraphModule, example_inputs: Sequence[Any], record: GraphReport) -> Request:
    settings, target = record.settings, targets.find(record.plan.target)
    wanted = target.inductor_config if target is not None else None
    config = {**wanted(settings.level)} if wanted is not None else {}
    config |= policy.inductor_config(settings.provider, record.plan.target, settings.level)
    return Request(
        graph=gm,
        example_inputs=example_inputs,
        level=settings.level,
        training=record.facts.training,
        region_rows=record.plan.region_rows,
        ranking=_ranking(record),
        mode=settings.mode,
        threads=settings.threads,
        target_config=config,
        inductor_config=dict(settings.inductor),
        failed_later=lambda error: _backward_failed(record, error),
        left_to_eager=lambda reason: _left_to_eager(record, reason),
        noted=lambda reason: record.notes.append(str(reason)),
        move_to=record.plan.move_to,
        stays=_resident(gm, record.facts),
        transferred=lambda count: _transferred(record, count),
        buckets=settings.buckets,
        cache_folder=str(settings.cache_folder),
        dump_folder=str(debug.folder_of(record)) if debug.enabled() else None,
    )
