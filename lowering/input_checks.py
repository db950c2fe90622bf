"""Sizes and strides of inputs, which generated code checks in every call: of some it need not.

Dynamo's guards have compared them before, unless the user leaves guards out. The check is for
generated loops, which read memory by what they were told; our operators for layers compare the
tensors themselves. A network of 600 weights spent 170 us on it in each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowering.replacing import replaced


def of_others_only() -> contextlib.AbstractContextManager[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    return replaced(PythonWrapperCodegen, "codegen_input_size_asserts", _generating)


def _generating(generate: Callable[[Any], None]) -> Callable[[Any], None]:
    def generate_for_others(wrapper: Any) -> None:
        from torch._inductor.virtualized import V

        inputs = wrapper.get_graph_inputs
        ours = _read_by_ours_only(getattr(V.graph, "module", None))
        wrapper.get_graph_inputs = lambda: {
            name: value for name, value in inputs().items() if name not in ours
        }
        try:
            generate(wrapper)
        finally:
            del wrapper.get_graph_inputs

    return generate_for_others


def _read_by_ours_only(module: Any) -> set[str]:
    if not isinstance(module, fx.GraphModule):
        return set()
    given = module.graph.find_nodes(op="placeholder")
    return {node.name for node in given if node.users and all(map(_is_ours, node.users))}


_THAT_CHECK = (
    "openmp_convolution",
    "openmp_convolutions",
    "openmp_linear",
    "openmp_linears",
    "openmp_gated_linear",
)


def _is_ours(node: fx.Node) -> bool:
    target = node.target
    name = target.name() if isinstance(target, torch._ops.OpOverload) else ""
    return name.removeprefix("kernel_dispatch::").removesuffix("_half") in _THAT_CHECK
