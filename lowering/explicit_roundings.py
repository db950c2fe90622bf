"""A rounding that the user wrote, `x.half().float()`, is done.

Inductor (2.13) computes in float32 what is in half precision, and a number that was just rounded is
read as it was before: more exact, as between any two operators in half precision. Where someone
rounds floats and goes on in floats, the rounding is what is wanted (what a weight would lose, or a
simulated accelerator). Torch's own kernel does it then, and what follows reads its result.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering.conversions import converted
from lowering.regions.calls import has_transforms, name_of, value_of

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("rounded(Tensor x, ScalarType dtype) -> Tensor")
_library.impl("rounded", converted, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::rounded", converted, lib=_library)


def _keep_dtype(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: object) -> None:
    ctx.dtype = inputs[0].dtype  # type: ignore[attr-defined]


def _gradient(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple:
    return ROUNDED(grad, ctx.dtype), None  # type: ignore[attr-defined]  # it was rounded as well


torch.library.register_autograd(
    "kernel_dispatch::rounded", _gradient, setup_context=_keep_dtype, lib=_library
)
ROUNDED = torch.ops.kernel_dispatch.rounded.default

_CONVERTING = ("to", "half", "bfloat16", "float", "double", "type", "type_as")
_SAME_NUMBERS = ("view", "reshape", "flatten", "transpose", "permute", "t", "squeeze", "unsqueeze")
_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)


def keep(module: fx.GraphModule) -> None:
    """For a graph as Dynamo captured it, and those in it, which Inductor is about to take apart."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule) or has_transforms(part.graph):
            continue  # operators of ours have no rules for those of `torch.func`
        found = [node for node in part.graph.nodes if _rounds(node) and _goes_on_in_floats(node)]
        for node in found:
            node.op, node.target = "call_function", ROUNDED
            node.args, node.kwargs = (node.args[0], value_of(node).dtype), {}
        if found:
            part.recompile()


def _rounds(node: fx.Node) -> bool:
    if not _converts(node, _FLOATS, _HALVES) or "memory_format" in node.kwargs:
        return False
    return bool(value_of(node).device.type == "cpu" == value_of(node.args[0]).device.type)


def _goes_on_in_floats(node: fx.Node) -> bool:
    return any(
        _converts(user, _HALVES, _FLOATS)
        or (name_of(user) in _SAME_NUMBERS and _goes_on_in_floats(user))
        for user in node.users
    )


def _converts(
    node: fx.Node, given: tuple[torch.dtype, ...], wanted: tuple[torch.dtype, ...]
) -> bool:
    if name_of(node) not in _CONVERTING or not node.args:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    if not isinstance(before, FakeTensor) or not isinstance(after, FakeTensor):
        return False  # nor of subclasses, which have rules of their own
    return before.dtype in given and after.dtype in wanted
