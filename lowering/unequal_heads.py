"""Attention whose values have another size than its queries and keys, as LeViT's and DeepSeek's.

Torch's kernel for CPUs, which the attention region looks for, takes one size for all three; a call
with two would be computed as products with a softmax between them. So the smaller ones are filled
up with zeros, and the region, whose kernel takes two sizes, leaves the zeros out again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.regions import attention_call
from lowering.regions.calls import name_of, value_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fill_up(graph: fx.Graph) -> int:
    """Returns how many calls were changed."""
    return sum(
        _fill_up(graph, node)
        for node in list(graph.nodes)
        if name_of(node) == "scaled_dot_product_attention"
    )


def call(graph: fx.Graph, inputs: Sequence[fx.Node], sizes: tuple[int, int], more: Any) -> fx.Node:
    """Writes a call of torch's operator, of query, key and value; of `sizes` the second is of
    values."""
    widest, (size, of_values) = max(sizes), sizes
    filled = [
        _filled(graph, node, widest - own)
        for node, own in zip(inputs, (size, size, of_values), strict=True)
    ]
    if more.get("scale") is None:
        more = {**more, "scale": size**-0.5}
    new = graph.call_function(functional.scaled_dot_product_attention, tuple(filled), more)
    if of_values < widest:
        first: Any = (..., slice(None, of_values))
        new = graph.call_function(operator.getitem, (new, first))
    return new


def _filled(graph: fx.Graph, node: fx.Node, missing: int) -> fx.Node:
    return graph.call_function(functional.pad, (node, (0, missing))) if missing else node


def _fill_up(graph: fx.Graph, node: fx.Node) -> bool:
    given = attention_call.given(node)
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    values = [value_of(one) for one in inputs]
    if given["dropout_p"] != 0 or not all(is_usual(value) and value.dim() == 4 for value in values):
        return False
    query, key, value = (v.shape[-1] for v in values)
    if any(type(size) is not int or size == 0 for size in (query, key, value)):
        return False
    if query != key or query == value:
        return False
    with graph.inserting_before(node):
        put_in_place(graph, node, call(graph, inputs, (query, value), given))
    return True


def put_in_place(graph: fx.Graph, node: fx.Node, new: fx.Node) -> None:
    """Of a call, what computes the same: in rows, as torch's products lay it, where it shows."""
    if shows_layout(node):
        new = graph.call_method("contiguous", (new,))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def is_usual(value: torch.Tensor | None) -> bool:
    """May torch's kernel for CPUs take it?"""
    if value is None or value.layout is not torch.strided or value.is_nested:
        return False
    return value.dim() > 1 and value.dtype in _FLOATS and value.device.type == "cpu"


def shows_layout(product: fx.Node) -> bool:
    """Torch's operator lays its result as the query lies, where products lie in rows. Nobody sees
    it who only asks for the transposed one in rows."""
    transposed = list(product.users)
    if len(transposed) != 1 or name_of(transposed[0]) not in ("transpose", "permute"):
        return True
    readers = list(transposed[0].users)
    return len(readers) != 1 or name_of(readers[0]) not in ("contiguous", "reshape", "flatten")
