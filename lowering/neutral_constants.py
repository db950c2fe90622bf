"""Sums with zeros and products with ones or zeros, computed where it shows that they are.

Inductor takes `x + zeros` for `x`. Handed out, that is the caller's own tensor: writing into the
result changes the input, or another result. And it takes `x * 0` for zeros, whatever `x` holds: NaN
and infinities are lost.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from lowering import outputs
from lowering.replacing import replaced

aten = torch.ops.aten
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@contextlib.contextmanager
def computed() -> Iterator[None]:
    """For the time in which Inductor simplifies what autograd has traced."""
    from torch._inductor.fx_passes import joint_graph

    folder = getattr(joint_graph, "UniformValueConstantFolder", None)
    with (
        replaced(joint_graph, "remove_no_ops", _removing),
        replaced(folder, "_add_peephole_patterns", _folding),
    ):
        yield


def leave_out_sums(graph: fx.Graph) -> None:
    """`x + 0` where branches are summed up from zero on: of what a convolution or a BatchNorm
    makes, in which nobody counts on the sign of a zero."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        source, more = node.args
        if node.kwargs or type(more) not in (int, float) or more or _is_handed_out(node):
            continue
        if source.meta["val"].dtype == node.meta["val"].dtype and _sums_products(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _sums_products(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor:
        node = node.args[0]
    maker: Any = node.args[0] if node.target is operator.getitem else node
    return maker.target in (
        aten.convolution.default,
        aten._native_batch_norm_legit_no_training.default,
    )


def _removing(remove: Callable[..., None]) -> Callable[..., None]:
    def remove_where_nothing_shows(module: Any, zeros: Any, ones: Any) -> None:
        kept = {constant for node in _shown(module.graph) for constant in node.all_input_nodes}
        remove(module, zeros - kept, ones - kept)

    return remove_where_nothing_shows


def _shown(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.target in _ARITHMETIC and _is_handed_out(node))


def _is_handed_out(node: fx.Node) -> bool:
    return any(
        user.op == "output" or (outputs.is_view(user) and _is_handed_out(user))
        for user in node.users
    )


def _folding(add_patterns: Callable[[Any], None]) -> Callable[[Any], None]:
    def add_patterns_of_integers(folder: Any) -> None:
        add_patterns(folder)
        for node in [*folder.node_replacements]:
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                del folder.node_replacements[node]

    return add_patterns_of_integers
