"""The last provider of every target: the graph as Dynamo captured it, op by op, by torch itself."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowering import (
    before_autograd,
    direct_calls,
    from_weights,
    group_norm,
    in_place,
    merged_branches,
    patches,
    public_calls,
    recurrent,
    resampled,
    vocabulary,
    without_compiler,
)
from lowering.contract import Compiled, Probe, Provider, Region, RegionMaker, Request
from lowering.graphs import dump
from lowering.regions import calls, resampling
from lowering.regions import recurrent as recurrent_region
from lowering.regions.epilogue import Epilogue


def probe() -> Probe:
    return Probe.yes(torch.__version__)


def compile(request: Request) -> Compiled:
    if request.training:  # autograd runs the graph itself, with gradients of gradients too
        others = tuple(row for row in request.region_rows if row.provider != PROVIDER.name)
        request = replace(request, region_rows=others)
    written = patches.write_as_linear(request)
    merged = merged_branches.merge(request)
    request, ahead = from_weights.split(request)
    request, ordered = before_autograd.lower(request)
    if request.dump_folder:
        dump(request.graph, request.dump_folder)
    if request.region_rows and not request.training and vocabulary.may_hold_regions(request.graph):
        compiled = _with_library_calls(request)
    else:
        compiled = Compiled(run=without_compiler.prepare(request.graph).forward)
    compiled.notes += ahead.notes
    compiled.regions[:0] = [*merged, *ahead.regions, *ordered]
    changed = written or merged or ahead.regions
    compiled.plain = not changed and all(region.left for region in compiled.regions)
    compiled.run = before_autograd.counted(ahead.of(compiled.run), compiled.regions)
    return compiled


def _with_library_calls(request: Request) -> Compiled:
    """The ATen graph, op by op, with regions computed by their providers: needs no compiler."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import innermost_fn  # Dynamo itself forbids to trace what we give
    from torch._functorch._aot_autograd.utils import make_boxed_func

    from lowering import fast_paths, region_pass

    taken: list[Region] = []

    def compile_forward(module: fx.GraphModule, inputs: Any) -> Any:
        taken.extend(region_pass.lower_inference(module, request))
        if request.only_plan is None and any(not region.left for region in taken):
            in_place.put_back(module.graph)
            group_norm.use_caller(module.graph)
            public_calls.use(module.graph)
            direct_calls.use(module.graph)
        module.recompile()
        if request.only_plan is not None:
            request.only_plan(module, False)
        return make_boxed_func(module.forward)

    compile_graph = aot_autograd(
        fw_compiler=compile_forward,
        decompositions=fast_paths.rules(),
        keep_inference_input_mutations=True,
    )
    run = innermost_fn(compile_graph(request.graph, list(request.example_inputs)))
    if all(region.left for region in taken):  # then torch's calls as they were written cost less
        run = without_compiler.prepare(request.graph).forward
    return Compiled(run=run, regions=taken)


def _resampled(graph: fx.Graph, match: resampling.Resampling, epilogue: Epilogue) -> fx.Node:
    now = resampling.read(match.node)
    assert now is not None, "it was matched"
    operands = [_listed(graph, operand) for operand in now.operands]
    return graph.call_function(getattr(resampled.ours, now.operator).default, tuple(operands))


def _recurrent(graph: fx.Graph, match: recurrent_region.Recurrent, epilogue: Epilogue) -> fx.Node:
    now = recurrent_region.read(match.node)
    assert now is not None, "it was matched"
    operands = (now.input, now.lengths, list(now.state), list(now.weights))
    how = (now.biases, now.layers, now.dropout, now.training, now.bidirectional, now.batch_first)
    kind = calls.name_of(now.node)
    return graph.call_function(recurrent.layers, (kind, *operands, *how))


def _listed(graph: fx.Graph, operand: Any) -> Any:
    """A node that stands for several sizes, as a list of nodes."""
    sizes = operand.meta.get("example_value") if isinstance(operand, fx.Node) else None
    if not isinstance(sizes, tuple):
        return operand
    return [graph.call_function(operator.getitem, (operand, i)) for i in range(len(sizes))]


PROVIDER = Provider(
    name="eager",
    summary="torch's own kernels, op by op; refuses nothing",
    probe=probe,
    compile=compile,
    plans=True,
    # What depends on weights alone runs ahead of whichever provider has the graph.
    early_regions={
        "resampling": RegionMaker(_resampled),
        "recurrent": RegionMaker(_recurrent, packed_element=lambda match: 0),
        "branches": RegionMaker(None),
        "from_weights": RegionMaker(None),
    },
)
