"""Gradients of a graph that changes its inputs: of what it read, not of what is there afterwards.

AOTAutograd (torch 2.13) computes cheap functions again in the backward instead of keeping them,
also functions of a buffer that the forward has changed by then: a norm by a running mean square
gets gradients that are off by a quarter, without a word (pytorch#197039). Such values are kept
here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from lowering.outputs import is_view
from lowering.replacing import replaced


def read_once() -> AbstractContextManager[None]:
    """For the time in which a training graph is parted into forward and backward."""
    from torch._inductor import compile_fx

    def making(partition: Callable[..., Any]) -> Callable[..., Any]:
        def partitioned(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            for node in _changed(joint.graph):
                _keep_what_reads(node)
            return partition(joint, *args, **kwargs)

        return partitioned

    return replaced(compile_fx, "min_cut_rematerialization_partition", making)


def _changed(graph: fx.Graph) -> Iterator[fx.Node]:
    """Inputs that are written at the end of the graph, or by AOTAutograd after it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            yield node.args[0]
    context = torch._guards.TracingContext.try_get()
    known = getattr(getattr(context, "fw_metadata", None), "input_info", None) or ()
    inputs = [node for node in graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    if len(known) == len(inputs):
        yield from (node for node, info in zip(inputs, known, strict=True) if info.mutates_data)


def _keep_what_reads(node: fx.Node) -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    for user in node.users:
        if user.op != "call_function" or user.target is torch.ops.aten.copy_.default:
            continue
        if is_view(user) or _has_parts(user):
            _keep_what_reads(user)
        else:
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _has_parts(node: fx.Node) -> bool:
    return any(user.target is operator.getitem for user in node.users)
