"""What generated code is to write to memory before anything reads it, instead of making it anew.

- Copies into rows that are read more than once. Softmax and layer norm begin with a copy that lies
  as it is indexed, as eager's do. Inductor makes it wherever it is read: where neighbours lay apart
  they are gathered for each pass, number by number (a softmax over 196 keys whose heads lay
  innermost took 3.3 times as long as eager's). Where many neighbours belong to different rows,
  rows are computed side by side, which is as fast.
- What a kernel of ours reads with its last dimensions merged or split (features of an image).
  Inductor computes it in the kernel's shape, with a division for each number and no vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowering import outputs

aten = torch.ops.aten

_MANY = 64

# What reads a row before anything else of it can be computed.
_FIRST_PASSES = {
    aten.amax.default,
    aten.var_mean.correction,
    aten.mean.dim,
    aten.sum.dim_IntList,
}
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def mark(graph: fx.Graph) -> None:
    """For a graph that Inductor is about to generate code for, the last thing before."""
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        if _gathers_rows(copy) and _is_read_twice(copy):
            _write(copy)
    for target in _RESHAPES:
        for reshaped in graph.find_nodes(op="call_function", target=target):
            source = _computed(reshaped.args[0])
            if source and any(map(_is_kernel, reshaped.users)) and _merges_or_splits(reshaped):
                _write(source)


def _write(node: fx.Node) -> None:
    node.meta["inductor_realize_to_strides"] = True  # Inductor's own mark


def _gathers_rows(copy: fx.Node) -> bool:
    before, after = (node.meta.get("val") for node in (copy.all_input_nodes[0], copy))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    known = (*before.shape, *before.stride(), *after.stride())
    if after.device.type != "cpu" or any(not isinstance(number, int) for number in known):
        return False
    if before.stride() == after.stride() or not after.is_contiguous():
        return False
    return _neighbours(before) < _MANY


def _neighbours(value: torch.Tensor) -> int:
    """How many numbers of its innermost dimension lie side by side."""
    beside = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride == 1]
    return max(beside, default=1)


def _is_read_twice(copy: fx.Node) -> bool:
    return len(copy.users) > 1 and any(user.target in _FIRST_PASSES for user in copy.users)


def _computed(node: Any) -> fx.Node | None:
    """What a node is, or is a view of, if generated code computes it."""
    while isinstance(node, fx.Node) and outputs.is_view(node):
        node = node.all_input_nodes[0]
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    value = node.meta.get("val")
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return node if on_cpu and not _is_kernel(node) else None


def _merges_or_splits(reshaped: fx.Node) -> bool:
    """Are other numbers in its last dimension than before?"""
    before, after = (node.meta["val"].shape for node in (reshaped.all_input_nodes[0], reshaped))
    return bool(before and after) and not _is_same(before[-1], after[-1])


def _is_same(one: Any, other: Any) -> bool:
    """Without a question about symbols, which would be an assumption from now on."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def _is_kernel(node: fx.Node) -> bool:
    """Is it an operator of ours, which Inductor calls as it stands?"""
    return getattr(node.target, "namespace", None) == "kernel_dispatch"
