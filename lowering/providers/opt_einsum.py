"""The package opt_einsum: in which order three or more tensors are multiplied, chosen once.

Torch asks the package too where it is installed, but anew in every call of an eager graph. Here
the order becomes a part of the graph. It changes nothing but the order of sums; torch computes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from lowering.contract import Probe, Provider, RegionMaker
from lowering.regions.einsum import Einsum, Path
from lowering.regions.epilogue import Epilogue

_WORTH = 0.9  # an order that saves less than a tenth may as well be slower
_FEW = 5  # for so many operands all orders are tried; for more, dynamic programming


def probe() -> Probe:
    try:
        package = importlib.import_module("opt_einsum")
    except ImportError:
        return Probe.no("the package opt_einsum is not installed", "pip install opt_einsum")
    return Probe.yes(str(getattr(package, "__version__", "")))


def best(match: Einsum) -> Path | None:
    """The order with the fewest FLOPs; None where the package knows none in pairs."""
    strategies = ("optimal",) if len(match.shapes) <= _FEW else ("dp", "auto")
    found = [_path(match.equation, match.shapes, strategy) for strategy in strategies]
    in_pairs = [path for path in found if all(len(step) == 2 for step in path)]
    return min(in_pairs, key=lambda path: match.cost(path)[0], default=None)


@functools.lru_cache(maxsize=256)
def _path(equation: str, shapes: tuple[tuple[int, ...], ...], strategy: str) -> Path:
    contract_path: Any = importlib.import_module("opt_einsum").contract_path
    found, _ = contract_path(equation, *shapes, shapes=True, optimize=strategy)
    return cast("Path", tuple(tuple(step) for step in found))


def _refuses(match: Einsum) -> str:
    if not torch.backends.opt_einsum.enabled:
        return "torch.backends.opt_einsum.enabled is off"
    path = best(match)
    if path is None:
        return "opt_einsum found no order of pairs"
    flops, largest = match.cost(path)
    before, largest_before = match.cost(match.unordered)
    if flops > _WORTH * before:
        return "no order saves a tenth of the FLOPs"
    if largest > max(largest_before, *(match.size(term) for term in match.terms)):
        return "the order with the fewest FLOPs needs more memory"
    return ""


def _emit(graph: fx.Graph, match: Einsum, epilogue: Epilogue) -> fx.Node:
    path = best(match)
    assert path is not None, "refused"
    return graph.call_function(
        torch.ops.aten.einsum.default,
        (match.equation, list(match.operands)),
        {"path": [position for pair in path for position in pair]},
    )


def _saved(matches: Sequence[Einsum]) -> str:
    before = sum(match.cost(match.unordered)[0] for match in matches)
    after = sum(match.cost(best(match) or match.unordered)[0] for match in matches)
    return f"ordered: {after / 1e6:.3g} MFLOP instead of {before / 1e6:.3g}"


PROVIDER = Provider(
    name="opt_einsum",
    summary="the package opt_einsum: the order of products in an einsum of three or more tensors",
    probe=probe,
    requires=("pip install opt_einsum",),
    early_regions={"einsum": RegionMaker(_emit, refuses=_refuses, describe=_saved, silent=True)},
)
