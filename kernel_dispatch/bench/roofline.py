"""The least that a case costs: its FLOPs, and its weights, inputs and outputs moved once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from kernel_dispatch.bench.results import Limits, Roofline
from kernel_dispatch.bench.stepping import Step


def count(step: Step) -> tuple[int, int]:
    """FLOPs and bytes of one call. Products count two FLOPs per multiply-add, the rest nothing."""
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    # The fused attention of CPUs has no formula in torch; the products of its plain form have.
    with counter, sdpa_kernel(SDPBackend.MATH):
        outputs = step.run()
    moved = [*step.tensors(), *pytree.tree_leaves(outputs)]
    # Training reads the weights twice and writes a gradient for each: the last is in the outputs.
    again = step.parameters() if step.training else ()
    return counter.get_total_flops(), _bytes(moved) + _bytes(again)


def _lstm_layer(steps: Any, weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    """oneDNN's layer, for which torch has no formula; arguments are shapes."""
    return 2 * math.prod(steps[:-1]) * (math.prod(weight) + math.prod(hidden_weight))


_FORMULAS = {torch.ops.aten.mkldnn_rnn_layer: _lstm_layer}


def _bytes(tensors: Iterable[Any]) -> int:
    """Shared storage counts once; of an embedding table only what the lookups may touch is unknown,
    so a table counts whole."""
    sizes: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            sizes[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def against(flops: int, moved: int, limits: Limits) -> Roofline | None:
    """None where the limits were not measured."""
    if not limits.gemm_flops or not limits.read_bytes:
        return None
    compute, memory = flops / limits.gemm_flops, moved / limits.read_bytes
    bound = "compute" if compute >= memory else "memory"
    return Roofline(flops, moved, max(compute, memory), bound)
