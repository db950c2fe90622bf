"""The operators that region matchers want to see whole, and how they are taken apart afterwards.

Inductor decomposes activations and BatchNorm while the graph is traced. For inference graphs they
are kept until the regions have been matched; what no region took is decomposed then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowering import fast_paths, sizes_in_tensors
from lowering.regions import group_norm

aten = torch.ops.aten

_KEPT = (
    aten._native_batch_norm_legit_no_training.default,
    aten.gelu.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.elu.default,
)
# Kept where the images are large and in floats that a region takes.
_NORMS = (aten.native_group_norm.default, aten._native_batch_norm_legit.no_stats)


def table(norms: bool) -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions without those of the kept operators; torch's fast paths opened.

    `norms`: does anyone take group norms?
    """
    from torch._inductor.decomposition import select_decomp_table

    rules = select_decomp_table()
    apart = {op: rule for op, rule in rules.items() if op not in _KEPT}
    if norms:
        apart.update({op: _unless_taken(op, rules[op]) for op in _NORMS if op in rules})
    return {**apart, **fast_paths.rules()}


def _unless_taken(norm: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    def decomposition(image: torch.Tensor, *rest: Any) -> Any:
        return NotImplemented if group_norm.may_be_taken(norm, image) else rule(image, *rest)

    return decomposition


def keeps(module: fx.GraphModule) -> bool:
    """Is it safe to trace this Dynamo graph twice? Graphs within graphs and random numbers stay
    with Inductor's own order of things."""
    children = any(isinstance(child, fx.GraphModule) for child in module.children())
    higher = any(
        isinstance(node.target, torch._ops.HigherOrderOperator) for node in module.graph.nodes
    )
    return not children and not higher


_REGION_CALLS = frozenset(
    "linear conv1d conv2d conv3d conv_transpose2d conv_transpose3d _conv_forward "
    "matmul mm bmm addmm baddbmm einsum mv "
    "scaled_dot_product_attention multi_head_attention_forward "
    "_transformer_encoder_layer_fwd".split()
)


def may_hold_regions(module: fx.GraphModule) -> bool:
    """Is anything in this Dynamo graph a region, at first sight? What is not stays untraced: AOT
    tracing itself gives a wrong pseudo-inverse of complex matrices (torch 2.13), and it knows no
    number that is in a tensor."""
    nodes = [
        node
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    ]
    if any(_is_complex(node) or sizes_in_tensors.has_them(node) for node in nodes):
        return False
    return any(_called(node) in _REGION_CALLS for node in nodes)


def _called(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") or str(node.target)
    return name.split(".")[0]


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_complex()


def holds_kept(graph: fx.Graph) -> bool:
    return any(node.target in _KEPT for node in graph.nodes)


def holds_norms(graph: fx.Graph) -> bool:
    """Taken apart they are sums, which some passes look for."""
    return any(node.target in _NORMS for node in graph.nodes)


def take_apart(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same graph with Inductor's own decompositions of everything."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with fx.traceback.preserve_node_meta():
        result = make_fx(
            lambda *args: fx.Interpreter(module).run(*args),
            decomposition_table=select_decomp_table(),
        )(*inputs)
    _keep_names(module.graph, result.graph)
    # What Inductor wrote down about the outputs: which the user sees, and with which strides.
    output, new_output = (graph.output_node() for graph in (module.graph, result.graph))
    new_output.meta.update(output.meta)
    result.meta.update(module.meta)
    return result


def _keep_names(old: fx.Graph, new: fx.Graph) -> None:
    """Inputs keep their names and what is known of them."""
    pairs = zip(old.find_nodes(op="placeholder"), new.find_nodes(op="placeholder"), strict=True)
    for before, after in pairs:
        after.meta = {**after.meta, **{k: v for k, v in before.meta.items() if k != "val"}}
