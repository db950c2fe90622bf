"""What the report of a model's graphs proves: applied, fallen back, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_dispatch.reporting import GraphReport, Report


def applied(graphs: Report) -> list[str]:
    """ "region:provider" for each entry of the report's region lists that somebody else than eager
    computed. A region that was matched and left as it stands, or that never ran, is none."""
    return [
        f"{entry['region']}:{entry['provider']}"
        for graph in graphs
        for entry in graph.as_dict()["regions"]
        if _counts(entry, graph)
    ]


def _counts(entry: Mapping[str, Any], graph: GraphReport) -> bool:
    if entry["provider"] == "eager" or entry.get("left"):
        return False
    if entry["runs"] is None:  # of a backward, whose calls nobody counts
        return graph.runs > 0
    return bool(entry["runs"]) or (_silent(entry, graph) and graph.runs > 0)


def _silent(entry: Mapping[str, Any], graph: GraphReport) -> bool:
    return any(
        (part.name, part.provider) == (entry["region"], entry["provider"]) and part.silent
        for part in graph.regions
    )


def fallen_back(graphs: Report) -> list[str]:
    """Each thing that was meant to happen and did not, with its reason."""
    return [
        f"{one.stage}: {one.provider} fell back to {one.taken_by}: {one.reason}"
        for one in graphs.fallbacks
    ]


def counted(graphs: Report) -> dict[str, Any]:
    """What was counted and measured while the graphs were compiled and ran."""
    return {
        "graphs": len(graphs),
        "graph_breaks": sum(graph.graph_break is not None for graph in graphs),
        "runs": sum(graph.runs for graph in graphs),
        "compile_seconds": sum(sum(graph.seconds.values()) for graph in graphs),
        "packed_bytes": _packed_bytes(graphs),
        "transfers": sum(graph.transfers for graph in graphs),
    }


def _packed_bytes(graphs: Report) -> int | None:
    """None where a graph came out of torch's cache, and nobody knows."""
    parts = [part for graph in graphs for part in graph.as_dict()["regions"]]
    known = [part["packed_bytes"] for part in parts if "packed_bytes" in part]
    return None if None in known else sum(known)
