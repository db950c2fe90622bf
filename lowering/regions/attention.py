"""The attention region: scaled dot products of three activations, by torch's own operator.

Attention spelled out as products and a softmax has become this operator before: Inductor's joint
passes find many spellings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint, only_first_output
from lowering.regions.weights import Stays

aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """One match; `node` is the first output, and nobody uses the second (log-sum-exp)."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    causal: bool
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def work(self) -> Work:
        query, key, value = (n.meta["val"] for n in (self.query, self.key, self.value))
        pairs = math.prod(hint(size) for size in (*query.shape[:3], key.shape[2]))
        return Work(
            region="attention",
            dtypes=frozenset({str(query.dtype).removeprefix("torch.")}),
            op_count=1,
            flops=2 * pairs * (hint(query.shape[3]) + hint(value.shape[3])),
            dynamic=any(not isinstance(size, int) for size in (*query.shape, *key.shape)),
            shape_class="decode" if hint(query.shape[2]) == 1 else "prefill",
        )


def find(graph: fx.Graph, stays: Stays) -> Iterator[Attention]:
    for node in list(graph.nodes):
        if node.target is not aten._scaled_dot_product_flash_attention_for_cpu.default:
            continue
        output = only_first_output(node)
        if output is None:
            continue
        named: dict[str, Any] = dict(
            zip(("query", "key", "value", "dropout_p", "is_causal"), node.args, strict=False)
        )
        named.update(node.kwargs)
        mask, size = named.get("attn_mask"), named["query"].meta["val"].shape[3]
        scale = named.get("scale")
        if named.get("dropout_p", 0.0) or not isinstance(size, int):
            continue
        query, key, value = named["query"], named["key"], named["value"]
        output, query, key, value = _without_zeros(output, query, key, value)
        yield Attention(
            output,
            query,
            key,
            value,
            mask,
            bool(named.get("is_causal", False)),
            float(scale) if scale is not None else 1.0 / math.sqrt(size),
        )


def _without_zeros(
    output: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """What `unequal_heads` filled up, as it was before."""
    bare_query, bare_key, bare_value = (_unfilled(node) for node in (query, key, value))
    if bare_query.meta["val"].shape[-1] == bare_key.meta["val"].shape[-1]:
        query, key = bare_query, bare_key
    part = next(iter(output.users)) if len(output.users) == 1 else None
    size = bare_value.meta["val"].shape[-1]
    if bare_value is not value and part is not None and _is_first_part(part, size):
        output, value = part, bare_value
    return output, query, key, value


def _unfilled(node: fx.Node) -> fx.Node:
    if node.target is not aten.constant_pad_nd.default:
        return node
    args: Any = (*node.args, 0)
    image, sizes, value = args[:3]
    return image if len(sizes) == 2 and sizes[0] == 0 and sizes[1] > 0 and value == 0 else node


def _is_first_part(node: fx.Node, size: int) -> bool:
    """Of the last dimension, so many."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return False
    _, dim, start, end = node.args
    return dim in (3, -1) and start in (0, None) and type(end) is int and end == size
