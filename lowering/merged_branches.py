"""Convolutions of one image whose results are summed up, as one with the sum of their kernels.

Networks that are trained in branches (RepVGG, MobileOne) are slow in them. Their authors merge the
branches by a call of their own, which many who use them do not know of, and after which the model
can be trained no more. Here nothing of the model changes: the summed kernels depend on weights
alone, so that `from_weights` computes them once, and again when one of the weights changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from lowering import from_weights
from lowering.contract import Region, Request
from lowering.graphs import place
from lowering.regions.branch import Branch, Merge
from lowering.regions.branches import Sum, find
from lowering.regions.calls import name_of, value_of

REGION = "branches"
_TENSORS = 6  # of each branch: weight, bias, mean, variance, weight and bias of its norm

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define(
    "merged_kernels(Tensor?[] tensors, int[] places, float[] numbers, int groups) "
    "-> (Tensor, Tensor)"
)


def merge(request: Request) -> list[Region]:
    """Changes the request's graph; only where the kernels will be computed ahead of it."""
    rows = {row.region: row for row in request.region_rows}
    row = rows.get(REGION)
    if row is None or from_weights.REGION not in rows:
        return []
    sums = find(request.graph, from_weights.weights(request))
    if not sums:
        return []
    merges = [merge for one in sums for merge in one.merges]
    instead_of = Counter(
        name_of(node) for merge in merges for one in merge.branches for node in one.nodes
    )
    region = Region(
        name=row.region,
        provider=row.provider,
        count=len(merges),
        place=place(sums[0].node),
        detail="in place of " + ", ".join(f"{name} x{n}" for name, n in instead_of.items()),
        why=row.why,
        silent=True,
    )
    writer = _Writer(request.graph.graph)
    for one in sums:
        writer.replace(one)
    request.graph.recompile()
    return [region]


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._kernels: dict[Any, list[fx.Node]] = {}  # layers may be used several times

    def replace(self, found: Sum) -> None:
        graph, gone = self._graph, found.gone()
        with graph.inserting_before(found.node):
            terms = [self._convolution(merge) for merge in found.merges] + found.others
            total = terms[0]
            for term in terms[1:]:
                total = graph.call_function(operator.add, (total, term))
                total.meta = dict(found.node.meta)
        found.node.replace_all_uses_with(total)
        for node in sorted(gone, reverse=True):
            graph.erase_node(node)

    def _convolution(self, merge: Merge) -> fx.Node:
        """As the first branch, with other numbers."""
        first = merge.branches[0]
        assert first.window is not None
        _, stride, padding, dilation = map(tuple, first.window)
        weight, bias = self._kernels_of(merge)
        function = getattr(functional, f"conv{len(stride)}d")
        arguments = (first.image, weight, bias, stride, padding, dilation, first.groups)
        new = self._graph.call_function(function, arguments)
        new.meta = {**first.nodes[-1].meta, "example_value": value_of(first.nodes[0])}
        return new

    def _kernels_of(self, merge: Merge) -> list[fx.Node]:
        branches = merge.branches
        numbers = [n for one in branches for n in (one.factor, one.norm.eps if one.norm else 0.0)]
        tensors = [tensor for one in branches for tensor in one.tensors()]
        arguments = (tensors, merge.places, numbers, branches[0].groups)
        key = repr(arguments)
        if key not in self._kernels:
            last = self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):  # before whoever reads them
                self._kernels[key] = _kernels(self._graph, branches[0], arguments)
        return self._kernels[key]


def _kernels(graph: fx.Graph, first: Branch, arguments: tuple[Any, ...]) -> list[fx.Node]:
    whole = value_of(first.weight)
    with whole.fake_mode:
        values = torch.empty_like(whole, requires_grad=False), whole.new_empty(whole.shape[0])
    both = graph.call_function(torch.ops.kernel_dispatch.merged_kernels.default, arguments)
    both.meta = {**first.nodes[0].meta, "example_value": values}
    with graph.inserting_before(both.next):
        parts = [graph.call_function(operator.getitem, (both, i)) for i in range(len(values))]
    for part, value in zip(parts, values, strict=True):
        part.meta = {**first.nodes[0].meta, "example_value": value}
    return parts


# --- the kernels ----------------------------------------------------------------------------------


def _merged_kernels(
    tensors: Sequence[Tensor | None], places: Sequence[int], numbers: Sequence[float], groups: int
) -> tuple[Tensor, Tensor]:
    """Rounded once: summed up in float64."""
    like: Any = tensors[0]
    kernel = torch.zeros_like(like, dtype=torch.float64)
    shift = torch.zeros(like.shape[0], dtype=torch.float64)
    dims = like.dim() - 2
    for i in range(len(tensors) // _TENSORS):
        weight, bias, *norm = (_exact(t) for t in tensors[i * _TENSORS : (i + 1) * _TENSORS])
        factor, eps = numbers[2 * i : 2 * i + 2]
        scale, own_shift = _scale_and_shift(shift, bias, norm, eps)
        shift += factor * own_shift
        if weight is None:
            weight = _identity(like, groups)
        at = places[2 * dims * i : 2 * dims * (i + 1)]
        where: list[Any] = [
            slice(first, first + step * (size - 1) + 1, step)
            for first, step, size in zip(at[::2], at[1::2], weight.shape[2:], strict=True)
        ]
        kernel[(..., *where)] += weight * (factor * scale).reshape(-1, *[1] * (dims + 1))
    return kernel.to(like.dtype), shift.to(like.dtype)


def _exact(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)


def _scale_and_shift(
    like: Tensor, bias: Tensor | None, norm: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, Tensor]:
    """Of the outputs of a convolution with this bias, and a norm behind it."""
    shift = torch.zeros_like(like) if bias is None else bias
    mean, variance, weight, norms_bias = norm
    if mean is None or variance is None:
        return torch.ones_like(like), shift
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = (shift - mean) * scale
    return scale, shift if norms_bias is None else shift + norms_bias


def _identity(like: Tensor, groups: int) -> Tensor:
    """The kernel of one pixel that gives the image itself."""
    outputs, inputs = like.shape[:2]
    one_group = torch.eye(inputs, dtype=torch.float64)
    return one_group.repeat(groups, 1).reshape(outputs, inputs, *[1] * (like.dim() - 2))


def _sizes(
    tensors: Sequence[Tensor | None], places: Sequence[int], numbers: Sequence[float], groups: int
) -> tuple[Tensor, Tensor]:
    like: Any = tensors[0]
    return torch.empty_like(like), like.new_empty(like.shape[0])


_library.impl("merged_kernels", _merged_kernels, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::merged_kernels", _sizes, lib=_library)
