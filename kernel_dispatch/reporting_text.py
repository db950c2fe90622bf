"""The report as text that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowering.capability import GRAPH

if TYPE_CHECKING:
    from kernel_dispatch.reporting import GraphReport


def report_text(graphs: Sequence[GraphReport], verbose: bool) -> str:
    if not graphs:
        return "No graph of `unified` belongs here (kernel_dispatch.explain tells why)."
    fallbacks = sum(len(graph.fallbacks) for graph in graphs)
    head = f"{len(graphs)} graph{'s' * (len(graphs) != 1)}, {fallbacks} fallback" + "s" * (
        fallbacks != 1
    )
    return "\n".join([head, *(graph_text(graph, verbose) for graph in graphs)])


def graph_text(graph: GraphReport, verbose: bool) -> str:
    """Three lines for a graph where all went well; more only where there is more to say."""
    source = dict(graph.settings.sources).get("level", "default")
    lines = [
        f"graph {graph.compile_id} of {graph.function}"
        + (f"  {graph.place}" if graph.place else "")
    ]
    lines.append(
        f"  target {graph.target}, provider {graph.provider}, level {graph.level} (from {source}), "
        f"ran {graph.runs} time{'s' * (graph.runs != 1)}{_by_provider(graph)}"
    )
    lines.append(f"  {_facts(graph)}")
    lines += [_region_line(region) for region in graph._regions_as_dicts()[1:] if region["count"]]
    lines += [
        f"  FALLBACK while {_STAGES[f.stage]}: {f.provider} -> {f.taken_by}: "
        f"{f.error + ': ' if f.error else ''}{f.reason}"
        for f in graph.fallbacks
    ]
    if graph.graph_break:
        lines.append(f"  ends at a graph break: {graph.graph_break}")
    if graph.recompile_reason:
        lines.append(f"  recompiled because {_shortened(graph.recompile_reason)}")
    lines += [f"  note: {note}" for note in graph.notes]
    if graph.transfers:
        lines.append(f"  moved {graph.transfers} tensors between devices")
    if graph.guards[0]:
        lines.append("  guards: {} pinned, {} asked in each call".format(*graph.guards))
    lines.append(f"  compile {_seconds(graph)}; cache {_cache(graph)}")
    if verbose:
        lines += [f"  {line}" for line in _rejections(graph)]
    return "\n".join(lines)


def _shortened(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


_STAGES = {"plan": "planning", "compile": "compiling", "run": "running"}


def _by_provider(graph: GraphReport) -> str:
    counts = graph.runs_by_provider
    if set(counts) <= {graph.provider}:
        return ""
    return " (" + ", ".join(f"{n} by {who}" for who, n in counts.items()) + ")"


def _facts(graph: GraphReport) -> str:
    facts = graph.facts
    kind = "training" if facts.training else "inference"
    shapes = f"dynamic {', '.join(facts.dynamic_dims)}" if facts.dynamic else "static"
    return (
        f"{facts.op_count} ops, {facts.flops / 1e9:.3g} GFLOP, {facts.bytes_moved / 1e6:.3g} MB "
        f"moved op by op, {'/'.join(facts.dtypes) or 'no tensors'}, {kind}, {shapes}"
    )


def _region_line(region: dict[str, Any]) -> str:
    ran = f"ran {region['runs']} times"
    if region.get("left"):
        ran = "left as it is"
    if region.get("backward"):
        ran = "in the backward"
    line = f"  region {region['region']} x{region['count']}: {region['provider']}, {ran}"
    if region.get("detail"):
        line += f" {region['detail']}"
    if region.get("recipes"):
        megabytes = region["packed_bytes"] / 1e6
        line += f"; weights: {', '.join(region['recipes'])} (+{megabytes:.3g} MB)"
    return line


def _seconds(graph: GraphReport) -> str:
    return ", ".join(f"{stage} {value:.3f} s" for stage, value in graph.seconds.items()) or "-"


def _cache(graph: GraphReport) -> str:
    parts = [f"{key} {value}" for key, value in graph.cache.items() if key != "bypass_causes"]
    causes = graph.cache.get("bypass_causes") or []
    return (", ".join(parts) or "not used") + "".join(f" (bypass: {cause})" for cause in causes)


def _rejections(graph: GraphReport) -> list[str]:
    lines = []
    for rejection in graph.plan.rejected:
        who = rejection.target + (f"/{rejection.provider}" if rejection.provider else "")
        who += f" for {rejection.region}" if rejection.region != GRAPH else ""
        lines.append(f"not {who}: " + "; ".join(str(reason) for reason in rejection.reasons))
    return lines
