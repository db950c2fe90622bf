"""Products of bytes, as models have them whose linear layers were quantised.

Torch's kernel for CPUs (`_int_mm`) gives wrong numbers, without a word, where matrices lie
otherwise than in rows or columns; dimensions of size 1 are to have the strides of such, too (torch
2.13). Generated code hands over the one token of a decoder as a row with a stride of 0.
"""

from __future__ import annotations

import torch
from torch import fx

from lowering.graphs import call

aten = torch.ops.aten

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("integer_product(Tensor left, Tensor right) -> Tensor")


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return aten._int_mm.default(_as_it_should_lie(left), _as_it_should_lie(right))


def _as_it_should_lie(matrix: torch.Tensor) -> torch.Tensor:
    """In rows or columns without gaps. Where there is only one of either it is to lie in rows."""
    rows, columns = matrix.shape
    in_columns = min(rows, columns) > 1 and matrix.stride() == (1, rows)
    if in_columns or matrix.stride() == (columns, 1):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _like(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.int32)


_library.impl("integer_product", product, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::integer_product", _like, lib=_library)
_SAFE = torch.ops.kernel_dispatch.integer_product.default


def put_right(module: fx.GraphModule) -> None:
    """For a graph that Inductor is about to generate code for, and those of its branches."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule) and _put_right(part.graph):
            part.recompile()


def _put_right(graph: fx.Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten._int_mm.default)
    on_cpu = [node for node in nodes if node.meta["val"].device.type == "cpu"]
    for node in on_cpu:
        with graph.inserting_before(node):
            new = call(graph, _SAFE, *node.args)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return len(on_cpu)
