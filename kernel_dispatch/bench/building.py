"""A workload becomes a step on the device and in the dtype of the run, and gets a fingerprint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kernel_dispatch.bench.stepping import Step
from kernel_dispatch.bench.workload import Case, Workload

_SAMPLED = 1024  # values per tensor
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Built:
    step: Step
    fingerprint: str
    dtype: str
    group: str


def build(workload: Workload, seed: int, dtype: str | None, device: str, training: bool) -> Built:
    if reason := workload.missing():
        raise RuntimeError(reason)
    if training and not workload.trains:
        raise RuntimeError(f"{workload.name} has no training step")
    if dtype and workload.dtypes and dtype not in workload.dtypes:
        raise RuntimeError(f"{workload.name} exists in {', '.join(workload.dtypes)} only")
    torch.manual_seed(seed)
    case = _placed(workload.build(), getattr(torch, dtype) if dtype else None, device)
    step = Step(case, training)
    tensors = list(step.tensors())
    return Built(step, fingerprint(tensors), _dtype_of(tensors), workload.group)


def _placed(case: Case, dtype: torch.dtype | None, device: str) -> Case:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    fn: Any = case.fn
    if isinstance(fn, nn.Module):
        fn = fn.to(device, dtype)
    args, kwargs = pytree.tree_map(move, (tuple(case.args), dict(case.kwargs)))
    return Case(fn, args, kwargs)


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Bits and shapes of all tensors as one short text; of a large tensor, bits spread over it.

    A builder that draws from somewhere else draws all of a tensor from there, so samples tell.
    """
    total = 0
    for tensor in tensors:
        flat = tensor.detach().to("cpu").flatten()
        flat = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        if flat.dtype == torch.bool:
            flat = flat.to(torch.uint8)
        words = flat.view(_WORDS[flat.element_size()])
        total = hash((total, *tensor.shape, *words.tolist()))
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


def _dtype_of(tensors: Iterable[torch.Tensor]) -> str:
    """The dtype that most of the numbers have, floating ones first."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        weight = tensor.numel() << 40 if tensor.is_floating_point() else tensor.numel()
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + weight
    return max(sizes, key=lambda name: sizes[name]) if sizes else "none"
