"""What a node of a Dynamo graph does, operator by operator: may it be computed ahead of its call?

A node is run once more on fake tensors, and what it comes down to is looked at: the names of torch
functions say little (`F.embedding` may write into its table, `F.dropout` may draw numbers), the
schemas of ATen operators say it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowering.writing import tensors, written_by

aten = torch.ops.aten

_NOT_TWICE_THE_SAME = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
_COPIES = {
    *(aten._to_copy, aten.clone, aten.repeat, aten._unsafe_view),
    *(aten.lift_fresh, aten.lift_fresh_copy),
}
_UNINITIALIZED = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided),
}
# Written by a pass of ours that counts on it that they are computed ahead of the calls.
OURS = {"kernel_dispatch::merged_kernels"}
# They write their statistics, of which their schemas say nothing.
_BATCH_NORMS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}

# Number by number, Inductor does it in the loop that reads the result: `1 + weight` of a norm in
# each layer costs less than asking whether the weights have changed.
_FUSED = 4


@dataclass(frozen=True)
class Steps:
    """What a node comes down to."""

    moves_only: bool  # renames or copies numbers, computes none
    elements: int  # that are read and written by what computes; fewer for what would be fused


class _NotPureError(Exception):
    pass


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moves_only = True
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_pure(func, args):
            raise _NotPureError(str(func))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALIZED and result.numel():
            raise _NotPureError(str(func))
        if not _moves_only(func):
            self.moves_only = False
            count = sum(one.numel() for one in tensors([*args, result]))
            fuses = torch.Tag.pointwise in func.tags
            self.elements += count // _FUSED if fuses else count
        return result


def steps(node: fx.Node, mode: FakeTensorMode) -> Steps | None:
    """None: not to be computed at another time or another number of times than it is called."""
    if written_by(node):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    try:
        with torch.no_grad(), mode, _Recorder() as seen:
            _called(node)(*args, **kwargs)
    except Exception:  # noqa: BLE001  (what does not even run here is left where it is)
        return None
    return Steps(seen.moves_only, seen.elements)


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _called(node: fx.Node) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target))
    return node.target


def _is_pure(func: Any, args: Any) -> bool:
    known = func.namespace in ("aten", "prims", "prim") or func.name() in OURS
    if not known or func._schema.is_mutable:
        return False
    if func.overloadpacket in _BATCH_NORMS and args[3] is not None and args[5]:
        return False
    return _NOT_TWICE_THE_SAME.isdisjoint(func.tags)


def _moves_only(func: Any) -> bool:
    """A view, a copy, another dtype, or a question for what is known without the numbers."""
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return is_view or func.namespace == "prim" or func.overloadpacket in _COPIES
