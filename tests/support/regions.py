"""What tests of the CPU's regions share: where they are taken, by whom, and what was reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.support.compiling import compile_at
from tests.support.modules import in_double
from tests.support.numerics import assert_contract
from tests.support.reports import fallbacks_of, graph_reports

# Where linear layers and convolutions are taken: a level, and by whom.
PLACES = ("O1 mkldnn", "O2 mkldnn", "O2 openmp")
Row = tuple[str, str, int, int]


def places(*names: str) -> Any:
    """Parametrize a test over `place`, of PLACES."""
    return pytest.mark.parametrize("place", names or PLACES, ids=lambda n: n.replace(" ", "-"))


def level_of(place: str) -> str:
    return place.split()[0]


def provider_at(place: str) -> str:
    return place.split()[1]


def compile_in(place: str, function: Any, **kwargs: Any) -> Any:
    """At the level of the place, with no other provider of linear layers and convolutions."""
    from lowering import providers

    others = set(providers.names()) - {"inductor", "eager", "mha", provider_at(place)}
    options = {"disable": sorted(others), **kwargs.pop("options", {})}
    return compile_at(level_of(place), function, options=options, **kwargs)


def region_rows(compiled: Any) -> list[Row]:
    """(region, provider, how many in the graph, how often run) over all graphs."""
    return [
        (row["region"], row["provider"], row["count"], row["runs"])
        for graph in graph_reports(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] != "graph"
    ]


def assert_regions(compiled: Any, *rows: Row, besides: str = "product") -> None:
    """These regions, taken and run this often (`besides` is not looked at); nothing fell back."""
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    found = [row for row in region_rows(compiled) if row[0] != besides]
    assert sorted(found) == sorted(rows), found


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
    from kernel_dispatch import settings
    from lowering.native import library

    library.keep_in(settings.resolve().cache_folder)
    found = library.probe()
    if not found.available:
        pytest.skip(found.reason)
    return torch.ops.kernel_dispatch


def hold(compiled: Any, model: Any, *inputs: Any, where: str = "") -> Any:
    """Call `compiled`, and compare it with eager and float64: numbers, and where outputs lie."""
    with torch.no_grad():
        got, own = compiled(*inputs), model(*inputs)
        assert_contract(got, own, in_double(model, *inputs), where)
    leaves = zip(pytree.tree_leaves(got), pytree.tree_leaves(own), strict=True)
    for index, (mine, eagers) in enumerate(leaves):
        if isinstance(eagers, torch.Tensor):
            assert _strides(mine) == _strides(eagers), f"{where}: strides of output {index}"
    return got


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of dimensions that have a next element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if tensor.numel() else []


@contextmanager
def no_cached_graphs() -> Iterator[None]:
    """A graph out of torch's caches was lowered earlier: its report lacks what was absorbed."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
