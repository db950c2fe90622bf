"""Operators of ours that are written in Python, called past the dispatcher.

From a graph that torch runs in Python, the way through the dispatcher and back into Python takes
some 10 us for each call. The operators stay what graphs are made of; only at the very end, where
nothing will look at a graph any more, the calls of an inference graph are replaced by functions,
which are made once for each of them and know what does not change between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd import profiler

Function = Callable[..., Any]
# Operator -> how many of its arguments come with each call; the function for what the others are.
_KNOWN: dict[OpOverload, tuple[int, Callable[..., Function]]] = {}


def offer(operator: OpOverload, varying: int, bind: Callable[..., Function]) -> None:
    """`bind(*constants)(*varying)` is what `operator(*varying, *constants)` computes."""
    _KNOWN[operator] = varying, bind


def use(graph: fx.Graph) -> None:
    """Nothing that looks for operators may read the graph after this."""
    for operator, (varying, bind) in _KNOWN.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            constants = node.args[varying:]
            if not _holds_nodes((constants, node.kwargs)):
                function = bind(*constants, **node.kwargs)
                node.target = _direct(operator, function, constants, node.kwargs)
                node.args, node.kwargs = node.args[:varying], {}


def _holds_nodes(arguments: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return bool(found)


def _direct(
    operator: OpOverload, function: Function, constants: tuple[Any, ...], named: Mapping[str, Any]
) -> Function:
    """Where somebody listens to the dispatcher (profilers, modes), the call goes through it."""
    listening = torch._C._len_torch_dispatch_stack

    def call(*varying: Any) -> Any:
        if profiler._is_profiler_enabled or listening():
            return operator(*varying, *constants, **named)
        return function(*varying)

    call.__name__ = operator._schema.name.rpartition("::")[2]
    return call
