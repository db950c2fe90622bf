"""Checkpoints of activations, in graphs that torch runs op by op.

Dynamo's operator for them is made for AOTAutograd, which replaces random numbers and writes by
what it can repeat. Called as it is, it would draw other numbers for the gradients than for the
result (dropout), and autograd would refuse a body that writes its buffers (BatchNorm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from lowering.graphs import CHECKPOINT_CONTEXT
from lowering.writing import storage, written_by

_OPERATOR = torch.ops.higher_order.tag_activation_checkpoint


def as_without_compiler(module: fx.GraphModule) -> fx.GraphModule:
    """Changes the graph and those of its bodies: nobody may compile them any more."""
    for body in _bodies(module):
        as_without_compiler(body)
    for node, body in _checkpoints(module):
        node.args = (node.args[0], _written(body), *node.args[1:])
        node.target = _checkpointed
    module.recompile()
    return module


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


def _checkpoints(module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    found = module.graph.find_nodes(op="call_function", target=_OPERATOR)
    bodies: list[Any] = [getattr(module, node.args[0].target, None) for node in found]
    pairs = zip(found, bodies, strict=True)
    return [(node, body) for node, body in pairs if isinstance(body, fx.GraphModule)]


def _bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [child for child in module.children() if isinstance(child, fx.GraphModule)]


def _written(body: fx.GraphModule) -> tuple[int, ...]:
    """Which of its arguments a body writes: through a view, or in a checkpoint of its own, too."""
    written = [node for inner in body.graph.nodes for node in _written_by(inner)]
    places = {_place(node) for node in written} - {None}
    given = body.graph.find_nodes(op="placeholder")
    return tuple(at for at, node in enumerate(given) if node in written or _place(node) in places)


def _written_by(node: fx.Node) -> list[fx.Node]:
    if node.target is not _checkpointed:
        return written_by(node)
    args: Any = node.args
    return [args[2 + at] for at in args[1]]


def _place(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return storage(value) if isinstance(value, torch.Tensor) else None
