"""What tests ask of the report, in one place."""

from __future__ import annotations

from typing import Any

from tests.support.compiling import BACKEND


def graph_reports(compiled: Any) -> list[Any]:
    """The graph records of one compiled callable; none where the backend under test is not ours."""
    if BACKEND != "unified":
        return []
    import kernel_dispatch

    return list(kernel_dispatch.report(compiled))


def fallbacks_of(compiled: Any) -> list[str]:
    """Each thing that was meant to happen and did not, as a sentence."""
    return [
        f"{fallback.stage}: {fallback.provider} -> {fallback.taken_by}: {fallback.reason}"
        for graph in graph_reports(compiled)
        for fallback in graph.fallbacks
    ]


def providers_of(compiled: Any) -> list[str]:
    """Who computed the graphs and the regions in them, each name once."""
    graphs = graph_reports(compiled)
    regions = {region.provider for graph in graphs for region in graph.regions}
    return sorted({graph.provider for graph in graphs} | regions)


def whole_graphs_by(compiled: Any) -> set[str]:
    """Who computed the graphs, whatever regions went to others."""
    return {graph.provider for graph in graph_reports(compiled)}


def assert_ran_as_planned(compiled: Any, level: str, target: str = "cpu") -> None:
    """Graphs were compiled for the target and the level, they ran, and nothing fell back."""
    if BACKEND != "unified":
        return
    graphs = graph_reports(compiled)
    assert graphs, "the report has no graph: the backend was never called"
    for graph in graphs:
        assert graph.target == target, graph
        assert str(graph.level) == level, graph
        assert graph.provider, graph
    assert sum(graph.runs for graph in graphs) > 0, "no graph of the report ever ran"
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    if level in ("O2", "O3"):
        assert providers_of(compiled) != ["eager"], "everything was left to eager: nothing is shown"
