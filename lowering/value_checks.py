"""Values that eager refuses, and generated code would compute with.

A probability above one, a standard deviation below zero, a binary cross-entropy of something else
than probabilities: eager's kernels raise, what Inductor makes of them (2.13) gives numbers or NaN.
Here the tensor is looked at before. An assertion without a message is left out altogether on the
way to Inductor; one with a message is not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering.regions.calls import has_transforms, name_of, value_of

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_library.define("within(Tensor x, float low, float high) -> Tensor")


def _within(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    if x.numel():
        least, most = torch.aminmax(x)
        if not (least >= low and most <= high):  # nor is NaN
            raise RuntimeError(f"a value from {least} to {most} is not from {low} to {high}")
    return x.new_zeros(())


_library.impl("within", _within, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernel_dispatch::within", lambda x, low, high: x.new_empty(()), lib=_library
)
WITHIN = torch.ops.kernel_dispatch.within.default
_NO_MESSAGE = "Expected Tensor with single nonzero value, but got zero"


class _Range(NamedTuple):
    place: int  # of the argument
    name: str
    low: float
    high: float
    arguments: int  # with more of them it is another function


_RANGES = {
    "bernoulli": _Range(0, "input", 0.0, 1.0, 1),
    "binary_cross_entropy": _Range(0, "input", 0.0, 1.0, 6),
    "normal": _Range(1, "std", 0.0, math.inf, 2),
}


def keep(module: fx.GraphModule) -> None:
    """For a graph as Dynamo captured it, and those in it, which Inductor is about to take apart."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule) or has_transforms(part.graph):
            continue  # operators of ours have no rules for those of `torch.func`
        if any([*map(_put_right, [*part.graph.nodes])]):
            part.recompile()


def _put_right(node: fx.Node) -> bool:
    if name_of(node) == "_assert_async" and len(node.args) == 1 and not node.kwargs:
        node.args = (*node.args, _NO_MESSAGE)
        return True
    known = _RANGES.get(name_of(node))
    if known is None or len(node.args) > known.arguments or "p" in node.kwargs:
        return False
    given: Any = node.kwargs.get(known.name)
    if known.name not in node.kwargs and len(node.args) > known.place:
        given = node.args[known.place]
    value = value_of(given)
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return False  # nor of a subclass, which has its own rules
    if not value.is_floating_point():
        return False
    with node.graph.inserting_before(node):
        # Zero, or an error: to be added, so that nobody leaves it out, and gradients pass by.
        values = node.graph.call_method("detach", (given,))
        zero = node.graph.call_function(WITHIN, (values, known.low, known.high))
        checked = node.graph.call_function(torch.add, (given, zero))
    checked.meta = dict(given.meta)
    node.args = tuple(
        checked if place == known.place else argument for place, argument in enumerate(node.args)
    )
    if known.name in node.kwargs:
        node.kwargs = {**node.kwargs, known.name: checked}
    return True
