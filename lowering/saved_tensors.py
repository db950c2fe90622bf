"""How the tensors that a forward saved lie in memory, in the graph of the backward.

Inductor lays out what it computes as it likes. AOTAutograd hands a backward such inputs as they
are, but its graph still has the strides from before the forward was compiled, and whoever asks it
whether an image lies channels last, or numbers of one sum side by side, gets a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp


def lay_out(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Strides of the inputs, and of all that is computed of them, as they will be."""
    placeholders = module.graph.find_nodes(op="placeholder")
    moved = [one for node, one in zip(placeholders, inputs, strict=True) if _is_moved(node, one)]
    if moved:
        _Strides(module, mode=moved[0].fake_mode).propagate_dont_convert_inputs(*inputs)


class _Strides(FakeTensorProp):
    """A view of what lies otherwise now may have to be a copy, as it will be in generated code."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _is_moved(node: fx.Node, given: Any) -> bool:
    known = node.meta.get("val")
    if not isinstance(given, FakeTensor) or not isinstance(known, torch.Tensor):
        return False
    strides = (*known.stride(), *given.stride())
    return all(isinstance(one, int) for one in strides) and known.stride() != given.stride()
