"""Attention in the four dimensions that torch's kernels take: batch, heads, length and size.

A call with more or fewer of them, with keys that several heads or texts share because their sizes
are broadcast (Falcon), or with a mask of three dimensions, is computed by torch as two products
with a softmax between them. So are rows whose numbers lie apart. Written in four, the same call
reaches the kernel that writes no matrix of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lowering.graphs import same_sizes
from lowering.regions import attention_call
from lowering.regions.calls import name_of, value_of
from lowering.unequal_heads import is_usual, put_in_place

Sizes = Sequence[Any]


def write(graph: fx.Graph) -> int:
    """Returns how many calls were changed."""
    return sum(
        _write(graph, node)
        for node in list(graph.nodes)
        if name_of(node) == "scaled_dot_product_attention"
    )


def method(graph: fx.Graph, name: str, node: fx.Node, *args: Any) -> fx.Node:
    """Calls a method of a tensor, with a value for the result where the tensor has one."""
    new = graph.call_method(name, (node, *args))
    if (value := value_of(node)) is not None:
        given = [value_of(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        new.meta["example_value"] = getattr(value, name)(*given)
    return new


def shared_leading(shapes: Sequence[Sizes]) -> tuple[Any, ...] | None:
    """The sizes before the last two, of tensors that are broadcast against each other. None where
    they do not fit, or a size that changes would have to be known for it."""
    dims = max(len(shape) for shape in shapes) - 2
    leading = [(*([1] * (dims - len(shape[:-2]))), *shape[:-2]) for shape in shapes]
    result = []
    for sizes in zip(*leading, strict=True):
        wide = [size for size in sizes if not (isinstance(size, int) and size == 1)]
        if not wide:
            result.append(1)
            continue
        agree = all(same_sizes((size,), wide[:1]) for size in wide)
        if not agree or (len(wide) < len(sizes) and not isinstance(wide[0], int)):
            return None
        result.append(wide[0])
    fits = dims < 3 or all(isinstance(size, int) for size in result)
    return tuple(result) if fits else None


@dataclass(frozen=True)
class InFour:
    """Writes the operands of one call whose result has the sizes `leading` before the last two.

    Without any, there is one text of one head. One of them is texts of one head each: the operator
    lays heads of the same text side by side, and these lie behind each other. The last one of
    several is heads, those before it are texts.
    """

    graph: fx.Graph
    leading: tuple[Any, ...]

    def operand(self, node: fx.Node) -> fx.Node:
        if value_of(node).stride(-1) != 1:
            node = method(self.graph, "contiguous", node)
        node = self._with_dims(node)
        pairs = zip(value_of(node).shape, self.leading, strict=False)
        wide = [-1 if same_sizes((own,), (size,)) else size for own, size in pairs]
        if any(size != -1 for size in wide):
            node = method(self.graph, "expand", node, *wide, -1, -1)
        return self._in_four(node)

    def takes_mask(self, shape: Sizes) -> bool:
        """More than four dimensions are merged, which partly shared ones cannot be."""
        texts = tuple(shape)[-len(self.leading) - 2 : -3]
        whole = len(shape) == len(self.leading) + 2 and same_sizes(texts, self.leading[:-1])
        return whole or len(self.leading) < 3 or all(size == 1 for size in texts)

    def mask(self, node: fx.Node) -> fx.Node:
        """Torch takes masks of two dimensions as well."""
        while value_of(node).dim() < 2:
            node = method(self.graph, "unsqueeze", node, 0)
        return node if value_of(node).dim() == 2 else self._in_four(self._with_dims(node))

    def result(self, node: fx.Node) -> fx.Node:
        if len(self.leading) == 2:
            return node
        if len(self.leading) > 2:
            return self.graph.call_method("unflatten", (node, 0, self.leading[:-1]))
        node = self.graph.call_method("squeeze", (node, 1))
        return node if self.leading else self.graph.call_method("squeeze", (node, 0))

    def _with_dims(self, node: fx.Node) -> fx.Node:
        for _ in range(len(self.leading) + 2 - value_of(node).dim()):
            node = method(self.graph, "unsqueeze", node, 0)
        return node

    def _in_four(self, node: fx.Node) -> fx.Node:
        if len(self.leading) > 2:
            return method(self.graph, "flatten", node, 0, -4)
        for at in {0: (0, 0), 1: (1,), 2: ()}[len(self.leading)]:
            node = method(self.graph, "unsqueeze", node, at)
        return node


def _write(graph: fx.Graph, node: fx.Node) -> bool:
    given = attention_call.given(node)
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    values = [value_of(one) for one in inputs]
    if given["dropout_p"] != 0 or given["enable_gqa"] or not all(map(is_usual, values)):
        return False
    mask = value_of(given["attn_mask"])
    if given["attn_mask"] is not None and mask is None:
        return False
    masks = [] if mask is None else [mask]
    leading = shared_leading([value.shape for value in values])
    if leading is None or _is_in_four(leading, values, masks):
        return False
    four = InFour(graph, leading)
    if not all(_is_no_wider(one, values) and four.takes_mask(one.shape) for one in masks):
        return False
    with graph.inserting_before(node):
        operands = tuple(four.operand(one) for one in inputs)
        if masks:
            given["attn_mask"] = four.mask(given["attn_mask"])
        new = graph.call_function(functional.scaled_dot_product_attention, operands, given)
        put_in_place(graph, node, four.result(new))
    return True


def _is_no_wider(mask: torch.Tensor, values: Sequence[torch.Tensor]) -> bool:
    """Torch refuses a mask with more texts or heads than there are scores."""
    of_scores = [value.shape for value in values[:2]]
    alone, both = shared_leading(of_scores), shared_leading([*of_scores, mask.shape])
    return alone is not None and both is not None and same_sizes(alone, both)


def _is_in_four(
    leading: Sizes, values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> bool:
    alike = all(same_sizes(value.shape[:-2], leading) and value.stride(-1) == 1 for value in values)
    return alike and len(leading) == 2 and all(mask.dim() in (2, 4) for mask in masks)
