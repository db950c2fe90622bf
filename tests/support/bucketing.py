"""A backend that runs graphs in buckets with plain torch, with garbage wherever they are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.bucketing import Bucketing, Key, decompositions, plan
from lowering.bucketing.call import fixed
from lowering.reasons import Reason


def garbage(like: torch.Tensor) -> torch.Tensor:
    """Every kind of number that would be seen in a result: NaN, infinite, large, zero, none."""
    if like.dtype == torch.bool:
        return torch.rand(like.shape) < 0.5
    chance = torch.rand(like.shape)
    if like.is_floating_point() or like.is_complex():
        numbers = torch.randn(like.shape).mul(1e4).to(like.dtype)
        numbers[chance < 0.3] = float("nan")
        numbers[(chance > 0.3) & (chance < 0.4)] = float("inf")
        numbers[(chance > 0.4) & (chance < 0.5)] = float("-inf")
        return numbers
    limits = torch.iinfo(like.dtype)
    anything = torch.randint(limits.min, limits.max, like.shape, dtype=torch.int64)
    return torch.where(chance < 0.3, 0, anything).to(like.dtype)


class InBuckets:
    """`torch.compile(f, backend=InBuckets())`; what it saw is kept for the test."""

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        self.sizes = sizes
        self.graphs = 0
        self.refusals: list[Reason] = []
        self.compiled: dict[tuple[int, Key], fx.GraphModule] = {}
        self.operators: set[str] = set()  # those that saw a size that varies
        self.padded = 0  # calls in which something was padded

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        backend = aot_autograd(fw_compiler=self._compile, decompositions=decompositions())
        return backend(module, inputs)

    def _compile(self, module: fx.GraphModule, _: Any) -> Any:
        self.graphs += 1
        self.operators |= {str(node.target) for node in module.graph.nodes if _varies(node)}
        number, planned = self.graphs, plan(module)
        if isinstance(planned, Reason):
            self.refusals.append(planned)
            return module.forward
        return lambda *args: self._run(planned, number, args)

    def _run(self, bucketing: Bucketing, number: int, args: Sequence[Any]) -> Any:
        key = bucketing.key(args, self.sizes)
        at = self.compiled.get((number, key))
        if at is None:
            at = self.compiled[number, key] = bucketing.at(key)
        outputs = at.forward(*self._with_garbage(bucketing, args, key))
        return bucketing.crop(outputs, args, key)

    def _with_garbage(self, bucketing: Bucketing, args: Sequence[Any], key: Key) -> list[Any]:
        marks = [torch.ones_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        ready = []
        before = self.padded
        for tensor, mark in zip(bucketing.pad(args, key), bucketing.pad(marks, key), strict=True):
            is_padding = mark == 0
            if tensor.ndim and bool(is_padding.any()):
                self.padded = before + 1
                tensor = torch.where(is_padding, garbage(tensor), tensor)
            ready.append(tensor)
        return ready


def _varies(node: fx.Node) -> bool:
    return not all(fixed(one.meta.get("val")) for one in (node, *node.all_input_nodes))
