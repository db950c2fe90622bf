"""What tests of the CPU's regions share: where they are taken, by whom, and what was reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compiling import compile_at
from tests.support.reports import fallbacks_of, graph_reports

# Who takes linear layers and convolutions: at a level, with these providers disabled.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "O1 mkldnn": ("O1", {}),
    "O2 mkldnn": ("O2", {"disable": ["openmp"]}),
    "O2 openmp": ("O2", {}),
}
Row = tuple[str, str, int, int]


def places(*names: str) -> Any:
    """Parametrize a test over `place`, a key of PLACES."""
    return pytest.mark.parametrize(
        "place", names or list(PLACES), ids=lambda n: n.replace(" ", "-")
    )


def provider_at(place: str) -> str:
    return place.split()[1]


def compile_in(place: str, function: Any, **kwargs: Any) -> Any:
    level, options = PLACES[place]
    return compile_at(level, function, options=options, **kwargs)


def region_rows(compiled: Any) -> list[Row]:
    """(region, provider, how many in the graph, how often run) over all graphs."""
    return [
        (row["region"], row["provider"], row["count"], row["runs"])
        for graph in graph_reports(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] != "graph"
    ]


def assert_regions(compiled: Any, *rows: Row) -> None:
    """These regions, taken and run this often; and nothing fell back."""
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    assert sorted(region_rows(compiled)) == sorted(rows)


def details(compiled: Any, region: str) -> list[str]:
    """What was absorbed behind the regions of one kind."""
    return [
        row.get("detail", "")
        for graph in graph_reports(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] == region
    ]


def packed_count() -> int:
    """How often any weight was packed, by whomever."""
    from lowering.native import library
    from lowering.providers import mkldnn

    return library.packed_count() + mkldnn.weights.packed


def kernels() -> Any:
    """The operators of our C++ library; a test that needs them is skipped without a compiler."""
    from lowering.native import library

    found = library.probe()
    if not found.available:
        pytest.skip(found.reason)
    return torch.ops.kernel_dispatch
