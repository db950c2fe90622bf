"""The linear region where Dynamo sees it, with its weight as the tensor that it really is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.capability import Work
from lowering.graphs import captured, hint
from lowering.profile import gemm_shape
from lowering.regions.calls import arguments, dtype_name, name_of, value_of


@dataclass(frozen=True)
class LinearCall:
    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: Any
    absorbed: Sequence[fx.Node] = ()

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.weight).dtype

    @property
    def stays(self) -> bool:
        """Is the weight a parameter or a buffer, and not computed in this graph?"""
        if self.weight.op != "placeholder":
            return False
        known = self.weight.meta.get("tensor_dict", {})
        is_parameter = isinstance(value_of(self.weight), torch.nn.Parameter)
        return is_parameter or "_dynamo_static_input_type" in known

    @property
    def real_weight(self) -> torch.Tensor | None:
        """The parameter itself, where Dynamo says which it is; its numbers may be looked at."""
        given = captured(self.weight)
        fake = torch._subclasses.fake_tensor.FakeTensor
        real = isinstance(given, torch.nn.Parameter) and not isinstance(given, fake)
        return given.detach() if real and given.device.type != "meta" else None

    def work(self) -> Work:
        x, weight = value_of(self.input), value_of(self.weight)
        rows = math.prod(hint(size) for size in x.shape[:-1])
        return Work(
            region="linear",
            dtypes=frozenset({dtype_name(weight)}),
            op_count=1,
            flops=2 * rows * math.prod(hint(size) for size in weight.shape),
            dynamic=any(not isinstance(size, int) for size in x.shape),
            shape_class=gemm_shape(rows),
        )


def find(graph: fx.Graph) -> Iterator[LinearCall]:
    for node in list(graph.nodes):
        if name_of(node) != "linear":
            continue
        given = arguments(node, ("input", "weight", "bias"), {})
        x, weight = value_of(given["input"]), value_of(given["weight"])
        if x is not None and weight is not None and x.dtype == weight.dtype and weight.dim() == 2:
            yield LinearCall(node, given["input"], given["weight"], given["bias"])
