"""The attention region where Dynamo sees it: a call of scaled_dot_product_attention.

GPUs want it here: below autograd torch has already chosen one of its kernels, and the backward that
belongs to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import hint
from lowering.regions.calls import arguments, dtype_name, name_of, value_of

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
_DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


@dataclass(frozen=True)
class AttentionCall:
    """One call. `key` and `value` are as they were before their heads were repeated for it."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: Any
    dropout: Any
    causal: Any
    scale: Any
    absorbed: Sequence[fx.Node] = ()

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.query).dtype

    @property
    def kind(self) -> str:
        queries, keys = (hint(value_of(node).shape[-2]) for node in (self.query, self.key))
        if queries == 1 and keys > 1:
            return "decode"
        return "prefill" if self.mask is None else "masked"

    def work(self) -> Work:
        query, key, value = (value_of(node) for node in (self.query, self.key, self.value))
        sizes = (*query.shape[:-1], key.shape[-2])
        return Work(
            region="attention",
            dtypes=frozenset({dtype_name(query)}),
            op_count=1,
            flops=2 * math.prod(hint(s) for s in sizes) * (hint(query.shape[-1]) * 2),
            dynamic=any(not isinstance(size, int) for size in (*sizes, *value.shape)),
            shape_class=self.kind,
        )


def find(graph: fx.Graph) -> Iterator[AttentionCall]:
    for node in list(graph.nodes):
        if name_of(node) != "scaled_dot_product_attention":
            continue
        named = given(node)
        values = [value_of(named[name]) for name in _NAMES[:3]]
        if any(value is None or value.dim() != 4 for value in values):
            continue
        key, of_key = _unrepeated(named["key"])
        value, of_value = _unrepeated(named["value"])
        if value_of(key).shape[1] != value_of(value).shape[1]:
            key, value, of_key, of_value = named["key"], named["value"], (), ()
        yield AttentionCall(
            node,
            named["query"],
            key,
            value,
            named["attn_mask"],
            named["dropout_p"],
            named["is_causal"],
            named["scale"],
            (*of_key, *of_value),
        )


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, all of them."""
    return arguments(node, _NAMES, _DEFAULTS)


def by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, those that it has."""
    return {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def _unrepeated(node: fx.Node) -> tuple[fx.Node, Sequence[fx.Node]]:
    """The tensor whose heads were repeated, as transformers does it: x[:, :, None].expand(...)
    .reshape(...); and the nodes in between, last one first."""
    chain: list[Any] = [node]
    for wanted in ("reshape", "expand"):
        below = chain[-1].args[0] if name_of(chain[-1]) == wanted else None
        if not isinstance(below, fx.Node):
            return node, ()
        chain.append(below)
    inserted: Any = chain[-1]
    if inserted.target is not operator.getitem or not _inserts_after_heads(inserted.args[1]):
        return node, ()
    base, repeated = value_of(inserted.args[0]), value_of(node)
    fits = base is not None and base.dim() == 4 and base.shape[2:] == repeated.shape[2:]
    return (inserted.args[0], tuple(chain)) if fits else (node, ())


def _inserts_after_heads(index: Any) -> bool:
    everything = slice(None, None, None)
    return isinstance(index, tuple) and index[:3] == (everything, everything, None)
