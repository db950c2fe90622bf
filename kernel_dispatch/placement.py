"""A forced device that is not where the tensors are: move them, run there, bring results back.

Parameters and buffers move once and stay, keyed by the tensor and its version, so that an update
after compilation is seen. Inputs and outputs move on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from kernel_dispatch.reporting import GraphReport
from lowering import targets
from lowering.contract import Compiled, Graph
from lowering.elsewhere import retarget
from lowering.graphs import clone
from lowering.packing import PackedWeights

CompileOnTarget = Callable[[fx.GraphModule, Sequence[Any], GraphReport], tuple[str, Compiled]]


# Parameters and buffers that stay on a device: moved again only when they changed.
_residents = PackedWeights()


def place(gm: fx.GraphModule, record: GraphReport, compile_on_target: CompileOnTarget) -> Graph:
    """The graph as a callable that takes and gives tensors on the caller's device."""
    device = record.plan.move_to
    assert device is not None
    target = targets.find(record.plan.target)
    assert target is not None
    custom = target.to_target
    to_device = custom or (lambda tensor: tensor.to(device))
    give_back = target.from_target or (lambda tensor, home: tensor.to(home))
    stays = [fact.kind != "input" for fact in record.facts.inputs]
    names = {fact.name: stay for fact, stay in zip(record.facts.inputs, stays, strict=True)}
    keep = [names.get(node.name, False) for node in gm.graph.find_nodes(op="placeholder")]
    homes = [_home(value) for value in _outputs(gm)]
    moved_graph = clone(gm) if custom else retarget(gm, torch.device(device))

    def move(tensor: torch.Tensor) -> torch.Tensor:
        record.transfers += 1
        with torch.no_grad():
            return to_device(tensor.detach())

    def compile_there(inner: fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        record.provider, there = compile_on_target(inner, inputs, record)
        record.regions = there.regions
        return there.run

    # Not the module itself: Dynamo skips GraphModule's own __call__ inside a compiled call.
    compiled = torch.compile(
        lambda *args: moved_graph.forward(*args), backend=compile_there, fullgraph=True
    )

    def run(*args: Any) -> tuple[Any, ...]:
        there = [
            arg
            if not isinstance(arg, torch.Tensor)
            else (_residents.get((arg,), device, partial(move, arg)) if stay else move(arg))
            for arg, stay in zip(args, keep, strict=True)
        ]
        results = compiled(*there)
        record.transfers += sum(isinstance(result, torch.Tensor) for result in results)
        return tuple(
            give_back(result, home) if isinstance(result, torch.Tensor) and home else result
            for result, home in zip(results, homes, strict=True)
        )

    return run


def _outputs(gm: fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return [
        value.meta.get("example_value") if isinstance(value, fx.Node) else value
        for value in output.args[0]
    ]


def _home(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) else None
