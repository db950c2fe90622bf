"""Places that eager does not count from the end, where Inductor would.

`index_select`, `index_add` and `index_copy` refuse a place of -1. Inductor takes them apart into
indexing, which has a last row for it (torch 2.13): without a word, padding became the last row of
the table. A place before the first is made one behind the last, which generated code refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowering.regions.calls import name_of, value_of

_PLACE = 2  # of the arguments: the tensor, the dimension, the places
_CALLS = ("index_select", "index_add", "index_add_", "index_copy", "index_copy_")


def refuse(module: fx.GraphModule) -> None:
    """For a graph as Dynamo captured it, and those in it, which Inductor is about to take apart."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _refuse(part)


def _refuse(module: fx.GraphModule) -> None:
    graph = module.graph
    found = [node for node in graph.nodes if name_of(node) in _CALLS and _is_on_cpu(node)]
    for node in found:
        places = _argument(node, _PLACE, "index")
        with graph.inserting_before(node):
            count = _size(graph, _argument(node, 0, "input"), _argument(node, 1, "dim"))
            negative = graph.call_function(torch.lt, (places, 0))
            counted = graph.call_function(torch.where, (negative, count, places))
        node.args = tuple(counted if arg is places else arg for arg in node.args)
        node.kwargs = {key: counted if arg is places else arg for key, arg in node.kwargs.items()}
    if found:
        module.recompile()


def _is_on_cpu(node: fx.Node) -> bool:
    wanted = (_argument(node, 0, "input"), _argument(node, _PLACE, "index"))
    values = [value_of(argument) for argument in wanted]
    known = all(value is not None and value.device.type == "cpu" for value in values)
    return known and isinstance(_argument(node, 1, "dim"), int) and bool(values[0].dim())


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _size(graph: fx.Graph, x: fx.Node, dim: int) -> Any:
    """A number, or a node where it changes."""
    size = value_of(x).shape[dim]
    return size if isinstance(size, int) else graph.call_method("size", (x, dim))
