"""What may follow a linear layer or a convolution and be computed in the same pass over its output.

    act(core + bias + before) * times + after

Absorbed as far as a provider can: each step needs the step before to have one user only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowering.graphs import only_user, same_sizes

aten = torch.ops.aten

# In the order of `enum class Act` in native/epilogue.h.
ACTIVATIONS = (
    "none relu gelu_erf gelu_tanh silu tanh sigmoid hardswish hardsigmoid clamp leaky_relu elu"
).split()


@dataclass(frozen=True)
class Activation:
    """An activation by the name that providers know it by, with up to two numbers."""

    name: str = "none"
    a: float = 0.0
    b: float = 0.0


NONE = Activation()


@dataclass(frozen=True)
class Abilities:
    """How much of an epilogue a provider computes itself."""

    activations: frozenset[str] = frozenset()
    before: bool = False
    times: bool = False
    after: bool = False


NO_ABILITIES = Abilities()


@dataclass
class Epilogue:
    """What was absorbed behind a core node; `last` is the node that the region replaces."""

    last: fx.Node
    activation: Activation = NONE
    before: fx.Node | None = None
    times: fx.Node | None = None
    after: fx.Node | None = None
    steps: list[str] = field(default_factory=list)  # for the report


def activation_of(node: fx.Node) -> Activation | None:
    """The activation that this node computes of its first argument."""
    simple = {
        aten.relu.default: "relu",
        aten.silu.default: "silu",
        aten.tanh.default: "tanh",
        aten.sigmoid.default: "sigmoid",
        aten.hardswish.default: "hardswish",
        aten.hardsigmoid.default: "hardsigmoid",
    }
    if node.target in simple:
        return Activation(simple[node.target])
    if node.target is aten.gelu.default:
        tanh = node.kwargs.get("approximate", "none") == "tanh"
        return Activation("gelu_tanh" if tanh else "gelu_erf")
    numbers: list[Any] = list(node.args[1:])
    if not all(isinstance(number, (int, float)) for number in numbers) or node.kwargs:
        return None
    if node.target is aten.hardtanh.default:
        return Activation("clamp", *numbers, *(-1.0, 1.0)[len(numbers) :])
    if node.target is aten.clamp.default and len(numbers) == 2:
        return Activation("clamp", *numbers)
    if node.target is aten.leaky_relu.default:
        return Activation("leaky_relu", *(numbers or [0.01]))
    if node.target is aten.elu.default and len(numbers) <= 1:
        return Activation("elu", *(numbers or [1.0]))
    return None


def absorb(core: fx.Node, can: Abilities) -> Epilogue:
    """Walk from `core` along single users for as long as the provider computes what they do."""
    found = Epilogue(core)
    if can.before and (step := _binary(found.last, aten.add.Tensor)):
        node, other = step
        follower = only_user(node)
        if follower is not None and _can_activate(follower, can):
            found.before, found.last = other, node
            found.steps.append("add")
    follower = only_user(found.last)
    if follower is not None and (activation := _can_activate(follower, can)):
        found.activation, found.last = activation, follower
        found.steps.append(activation.name)
    if can.times and (step := _binary(found.last, aten.mul.Tensor)):
        found.last, found.times = step
        found.steps.append("mul")
    if can.after and (step := _binary(found.last, aten.add.Tensor)):
        found.last, found.after = step
        found.steps.append("add")
    return found


def _can_activate(node: fx.Node, can: Abilities) -> Activation | None:
    activation = activation_of(node)
    if activation is None or activation.name not in can.activations:
        return None
    return activation if _same_kind(node, node.args[0]) else None


def _binary(node: fx.Node, target: object) -> tuple[fx.Node, fx.Node] | None:
    """The only user of `node`, if it is `target` of it and another tensor of its very shape."""
    user = only_user(node)
    if user is None or user.target is not target or user.kwargs or len(user.args) != 2:
        return None
    left, right = user.args
    other = right if left is node else left
    if not isinstance(other, fx.Node) or other is node or not _same_kind(user, node):
        return None
    return (user, other) if _same_kind(other, node) else None


def _same_kind(one: object, other: object) -> bool:
    """Equal in shape, dtype and strides: nothing is broadcast, promoted or laid out anew."""
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in (one, other)]
    left, right = values
    return (
        isinstance(left, torch.Tensor)
        and isinstance(right, torch.Tensor)
        and left.dtype == right.dtype
        and left.device == right.device
        and same_sizes(left.shape, right.shape)
        and same_sizes(left.stride(), right.stride())
    )
