"""Inputs that are written by index and then computed anew: not all in one piece of memory.

Inductor (2.13) does the first in place, in the input itself, since the input is overwritten in the
end. What overwrites it may be computed in one loop with reads at other places (`x.add_(x.flip(0))`
behind `x[i] = y`): numbers are read that were replaced, without a word (pytorch#198270).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lowering.graphs import call

aten = torch.ops.aten
# Done in place where Inductor may.
_BY_INDEX = (
    aten.index_put,
    aten._unsafe_index_put,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.slice_scatter,
    aten.select_scatter,
    aten.diagonal_scatter,
    aten.as_strided_scatter,
    aten.masked_scatter,
)

_CALLS = (
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten._scaled_dot_product_flash_attention_for_cpu,
)

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("copied(Tensor x) -> Tensor")  # Inductor takes a clone for nothing at all


def _copied(x: Tensor) -> Tensor:
    return x.clone()


_library.impl("copied", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::copied", _copied, lib=_library)


def put_right(graph: fx.Graph) -> None:
    """What is written by index is a copy of the input, where what the input becomes reads that."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        given, new = copy.args[:2]
        written = [user for user in given.users if _is_by_index(user) and user.args[0] is given]
        if given.op != "placeholder" or not _reads_what_it_replaces(new, given, written):
            continue
        for node in written:
            with graph.inserting_before(node):
                own = call(graph, torch.ops.kernel_dispatch.copied.default, given)
            node.args = (own, *node.args[1:])


def _is_by_index(node: Any) -> bool:
    return getattr(getattr(node, "target", None), "overloadpacket", None) in _BY_INDEX


def _reads_what_it_replaces(new: Any, given: fx.Node, written: list[fx.Node]) -> bool:
    """A cache that is written by index and no more is not meant, whoever reads it."""
    writes, node = [], new
    while _is_by_index(node):
        writes.append(node)
        node = node.args[0]
    if node is not given:
        return bool(written) and _reads([new], set(written))
    sources = [part for write in writes for part in write.all_input_nodes[1:]]
    return len(writes) > 1 and _reads(sources, set(writes))


def _reads(nodes: list[fx.Node], wanted: set[fx.Node]) -> bool:
    """In generated code: a product or an attention is over before anything is overwritten."""
    seen, left = set(nodes), list(nodes)
    while left:
        node = left.pop()
        if node in wanted:
            return True
        if getattr(node.target, "overloadpacket", None) in _CALLS or _is_ours(node):
            continue
        left += [one for one in node.all_input_nodes if one not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "kernel_dispatch"
