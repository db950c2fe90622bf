"""The last provider of every target: the graph as Dynamo captured it, op by op, by torch itself."""

from __future__ import annotations

import torch

from lowering.contract import Compiled, Probe, Provider, Request
from lowering.graphs import dump


def probe() -> Probe:
    return Probe.yes(torch.__version__)


def compile(request: Request) -> Compiled:
    if request.dump_folder:
        dump(request.graph, request.dump_folder)
    if request.region_rows and not request.training:
        from lowering import region_pass

        return region_pass.run_with_library_calls(request)
    return Compiled(run=request.graph.forward, plain=True)


PROVIDER = Provider(
    name="eager",
    summary="torch's own kernels, op by op; refuses nothing",
    probe=probe,
    compile=compile,
)
