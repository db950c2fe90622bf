"""Graphs that torch runs op by op: some of Dynamo's operators are made for AOTAutograd alone.

- A checkpoint of activations leaves random numbers and writes to AOTAutograd. Called as it is,
  it would draw other numbers for the gradients than for the result (dropout), and autograd would
  refuse a body that writes its buffers (BatchNorm).
- A part of the graph that was compiled once for several calls cannot be called with gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from lowering.graphs import CHECKPOINT_CONTEXT
from lowering.writing import storage, written_by


def prepare(module: fx.GraphModule) -> fx.GraphModule:
    """Changes the graph and those of its bodies: nobody may compile them any more."""
    given = module.graph.find_nodes(op="placeholder")
    _prepare(module, [node for node in given if _belongs_to_code(node)])
    return module


def _prepare(module: fx.GraphModule, closed_over: Collection[fx.Node]) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if not isinstance(body, fx.GraphModule):
            continue
        for call in list(node.users):
            operands = call.args[_FIRST_OPERAND.get(_name(call), len(call.args)) :]
            given = body.graph.find_nodes(op="placeholder")
            pairs = zip(given, operands, strict=False)
            inside = [own for own, operand in pairs if operand in closed_over]
            _prepare(body, inside)
            if _name(call) == _CHECKPOINT:
                call.args = (node, _written(body, inside), *operands)
                call.target = _checkpointed
            elif _name(call) == _SUBGRAPH:
                call.args = (node, *operands)
                call.target = _called
    module.recompile()


_CHECKPOINT, _SUBGRAPH = "tag_activation_checkpoint", "invoke_subgraph"
_FIRST_OPERAND = {_CHECKPOINT: 1, _SUBGRAPH: 2}


def _name(node: fx.Node) -> str:
    """Of an operator of higher order."""
    return str(getattr(node.target, "_name", "")) if node.op == "call_function" else ""


def _called(body: fx.GraphModule, *args: Any) -> Any:
    return body(*args)


def _checkpointed(body: fx.GraphModule, written: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """`written` stay out of what autograd saves: as buffers of a module they would, too."""
    kept = {at: args[at] for at in written}

    def call(*given: Any) -> Any:
        rest = iter(given)
        return body(*(kept[at] if at in kept else next(rest) for at in range(len(args))))

    if CHECKPOINT_CONTEXT in body.meta:
        kwargs["context_fn"] = body.meta[CHECKPOINT_CONTEXT]
    kwargs["use_reentrant"] = False  # the other kind does less, as AOTAutograd's does not
    given = [arg for at, arg in enumerate(args) if at not in kept]
    return checkpoint(call, *given, **kwargs)


def _belongs_to_code(node: fx.Node) -> bool:
    """To a module or a global, so that a body closes over it. Of an argument that a checkpoint was
    given autograd has to see that it was written: the gradient would be of the new numbers."""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and not getattr(source, "is_input", False)


def _written(body: fx.GraphModule, candidates: Collection[fx.Node]) -> tuple[int, ...]:
    """Which arguments a body writes: through a view, or in a checkpoint of its own, too."""
    written = [node for inner in body.graph.nodes for node in _written_by(inner)]
    places = {_place(node) for node in written} - {None}
    return tuple(
        at
        for at, node in enumerate(body.graph.find_nodes(op="placeholder"))
        if node in candidates and (node in written or _place(node) in places)
    )


def _written_by(node: fx.Node) -> list[fx.Node]:
    if node.target is not _checkpointed:
        return written_by(node)
    args: Any = node.args
    return [args[2 + at] for at in args[1]]


def _place(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return storage(value) if isinstance(value, torch.Tensor) else None
