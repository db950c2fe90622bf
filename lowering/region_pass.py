"""The pass that hands regions of an ATen graph to their providers, for eager and for Inductor."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection
from dataclasses import astuple
from typing import Any

import torch
from torch import fx

from lowering.capability import Situation
from lowering.contract import Compiled, Region, Request
from lowering.regions import linear

_REGIONS = (linear,)


def lower(graph: fx.Graph, request: Request) -> list[Region]:
    """Run every region's matcher over the graph; returns what was taken and by whom."""
    stays = static_inputs(graph)
    taken = []
    for region in _REGIONS:
        name = region.__name__.rpartition(".")[2]
        rows = [row for row in request.region_rows if row.region == name]
        if rows:
            taken += region.lower(graph, rows, _situation(request), stays)
    return taken


def _situation(request: Request) -> Situation:
    """Machine and wish were asked when the rows were chosen; here only the work is in question."""
    features = frozenset(name for row in request.region_rows for name in row.features)
    return Situation(level=request.level, features=features)


def static_inputs(graph: fx.Graph) -> Collection[str]:
    """Names of the graph inputs that are parameters or buffers, by AOTAutograd's own account."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    positions = set(getattr(metadata, "static_input_indices", None) or ())
    placeholders = graph.find_nodes(op="placeholder")
    return {node.name for index, node in enumerate(placeholders) if index in positions}


def uuid(request: Request) -> str:
    """Changes with the source of the pass and with the rows, so that no cached graph goes stale."""
    sources = [inspect.getsource(module) for module in _REGIONS]
    rows = [
        [sorted(value) if isinstance(value, frozenset) else value for value in astuple(row)]
        for row in request.region_rows
    ]  # sets print in another order in every process
    return hashlib.sha256(repr((sources, rows)).encode()).hexdigest()


def inductor_pass(request: Request, taken: list[Region]) -> Any:
    """The same pass in the form in which Inductor calls it and hashes it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RegionPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            taken.extend(lower(graph, request))

        def uuid(self) -> str:
            return uuid(request)

    return RegionPass()


def run_with_library_calls(request: Request) -> Compiled:
    """The ATen graph, op by op, with regions computed by their providers: needs no compiler."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    taken: list[Region] = []

    def compile_forward(graph: fx.GraphModule, inputs: Any) -> Any:
        taken.extend(lower(graph.graph, request))
        graph.recompile()
        return make_boxed_func(graph.forward)

    run = aot_autograd(fw_compiler=compile_forward, keep_inference_input_mutations=True)(
        request.graph, list(request.example_inputs)
    )
    return Compiled(run=run, regions=taken)
