"""Gradients of a graph that changes its inputs: of what it read, not of what is there afterwards.

AOTAutograd (torch 2.13) computes cheap functions again in the backward instead of keeping them,
also functions of a buffer that the forward has changed by then: a norm by a running mean square
gets gradients that are off by a quarter, without a word (pytorch#197039). Such values are kept
here. An input that the backward reads as it was (`nn.SiLU(inplace=True)` first of all) is copied;
torch raises there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowering.graphs import call
from lowering.outputs import is_view
from lowering.overwritten import COPIED


def read_once(graph: fx.Graph, forward_results: int) -> None:
    """Of a training graph that is not parted into forward and backward yet."""
    forward = _needed(graph, forward_results)
    for node in [*_changed(graph)]:
        if _is_read_later(node, forward):
            _copy(graph, node)
        else:
            _keep_what_reads(node)


def _changed(graph: fx.Graph) -> Iterator[fx.Node]:
    """Inputs that are written at the end of the graph, or by AOTAutograd after it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            yield node.args[0]
    (output,) = graph.find_nodes(op="output")
    results = output.meta.get("desc") or ()  # torch 2.8 tells less
    written = [result.mutated_input for result in results if hasattr(result, "mutated_input")]
    inputs = graph.find_nodes(op="placeholder")
    yield from (node for node in inputs if node.meta.get("desc") in written)


def _needed(graph: fx.Graph, results: int) -> set[fx.Node]:
    """What the forward computes, for its results and what it writes; all else is the backward's."""
    (output,) = graph.find_nodes(op="output")
    whole: Any = output.args[0]
    left = [node for node in whole[:results] if isinstance(node, fx.Node)]
    left += graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    needed = set(left)
    while left:
        inputs = [node for node in left.pop().all_input_nodes if node not in needed]
        needed.update(inputs)
        left += inputs
    return needed


def _is_read_later(node: fx.Node, forward: set[fx.Node]) -> bool:
    readers = [user for user in node.users if user.target is not torch.ops.aten.copy_.default]
    return any(
        _is_read_later(user, forward) if is_view(user) else user not in forward
        for user in readers
        if user.op != "output"
    )


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    """The backward itself reads the input: autograd raises where that was changed since."""
    readers = [user for user in node.users if user.target is not torch.ops.aten.copy_.default]
    last = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(last):
        copy = call(graph, COPIED, node)
    for reader in readers:
        if reader.op != "output":
            reader.replace_input_with(node, copy)


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
