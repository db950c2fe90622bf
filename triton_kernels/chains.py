"""Chains of elementwise operations as data: small programs, their meaning and their gradients.

Values are counted: first the tensors, then what each step computes. A step is an operation's name
and its operands: an int is the number of a value, a float is a constant.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triton_kernels.errors import KernelArgumentError, demand

Operand = int | float
Written = tuple[str, tuple[Operand, ...]]
# A name alone takes the value before it.
Step = str | tuple[str | Operand, ...]


@dataclass(frozen=True)
class Chain:
    """`outputs` are the numbers of the values that are wanted."""

    steps: tuple[Written, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        """As kernels and operators take it: `mul 0 1;silu 2>3`."""
        steps = ";".join(" ".join([name, *map(repr, given)]) for name, given in self.steps)
        return f"{steps}>{' '.join(map(str, self.outputs))}"


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Chain:
    """The chain that reads so."""
    steps, _, outputs = text.partition(">")
    written = (step.split() for step in steps.split(";") if step)
    known = tuple((name, tuple(map(_operand, given))) for name, *given in written)
    return Chain(known, tuple(map(int, outputs.split())))


def _operand(word: str) -> Operand:
    return int(word) if word.isdigit() else float(word)


# --- operations -----------------------------------------------------------------------------------

# Writes a step and gives the number of its value.
Write = Callable[..., Operand]
# From (write, gradient of the result, result, operands) to the gradient of each operand.
Gradient = Callable[..., Sequence[Operand | None]]


@dataclass(frozen=True)
class Operation:
    arity: int
    meaning: Callable[..., Tensor]
    gradient: Gradient | None  # None: not differentiable twice
    is_public: bool = True


def _without_second_derivative(arity: int, meaning: Callable[..., Tensor]) -> Operation:
    return Operation(arity, meaning, None, is_public=False)


def _by_slope(name: str) -> Gradient:
    return lambda w, g, y, a: [w("mul", g, w(f"{name}_slope", a))]


def _slope_of(name: str) -> Callable[[Tensor], Tensor]:
    return lambda a: torch.func.grad(lambda x: OPERATIONS[name].meaning(x).sum())(a)


def _share(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the larger of two gets of a gradient: half of it where they are equal."""
    return torch.where(a == b, g / 2, g).masked_fill(a < b, 0)


def _within(g: Tensor, a: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.where((a >= low) & (a <= high), g, 0)


def _gelu_tanh(a: Tensor) -> Tensor:
    return functional.gelu(a, approximate="tanh")


OPERATIONS: Mapping[str, Operation] = {
    "add": Operation(2, torch.add, lambda w, g, y, a, b: [g, g]),
    "sub": Operation(2, torch.sub, lambda w, g, y, a, b: [g, w("neg", g)]),
    "mul": Operation(2, torch.mul, lambda w, g, y, a, b: [w("mul", g, b), w("mul", g, a)]),
    "div": Operation(
        2,
        torch.div,
        lambda w, g, y, a, b: [w("div", g, b), w("neg", w("mul", g, w("div", y, b)))],
    ),
    "maximum": Operation(
        2, torch.maximum, lambda w, g, y, a, b: [w("share", g, a, b), w("share", g, b, a)]
    ),
    "minimum": Operation(
        2, torch.minimum, lambda w, g, y, a, b: [w("share", g, b, a), w("share", g, a, b)]
    ),
    "clamp": Operation(
        3, torch.clamp, lambda w, g, y, a, low, high: [w("within", g, a, low, high), None, None]
    ),
    "neg": Operation(1, torch.neg, lambda w, g, y, a: [w("neg", g)]),
    "abs": Operation(1, torch.abs, lambda w, g, y, a: [w("mul", g, w("sign", a))]),
    "sign": Operation(1, torch.sgn, lambda w, g, y, a: [None]),
    "square": Operation(1, torch.square, lambda w, g, y, a: [w("mul", g, w("mul", 2.0, a))]),
    "sqrt": Operation(1, torch.sqrt, lambda w, g, y, a: [w("div", g, w("mul", 2.0, y))]),
    "rsqrt": Operation(
        1,
        torch.rsqrt,
        lambda w, g, y, a: [w("mul", w("mul", -0.5, g), w("mul", y, w("square", y)))],
    ),
    "exp": Operation(1, torch.exp, lambda w, g, y, a: [w("mul", g, y)]),
    "log": Operation(1, torch.log, lambda w, g, y, a: [w("div", g, a)]),
    "relu": Operation(1, torch.relu, lambda w, g, y, a: [w("pass", g, y)]),
    "sigmoid": Operation(
        1, torch.sigmoid, lambda w, g, y, a: [w("mul", g, w("mul", y, w("sub", 1.0, y)))]
    ),
    "tanh": Operation(
        1, torch.tanh, lambda w, g, y, a: [w("mul", g, w("sub", 1.0, w("square", y)))]
    ),
    "silu": Operation(1, functional.silu, _by_slope("silu")),
    "gelu": Operation(1, functional.gelu, _by_slope("gelu")),
    "gelu_tanh": Operation(1, _gelu_tanh, _by_slope("gelu_tanh")),
    # What gradients are made of.
    "silu_slope": _without_second_derivative(1, _slope_of("silu")),
    "gelu_slope": _without_second_derivative(1, _slope_of("gelu")),
    "gelu_tanh_slope": _without_second_derivative(1, _slope_of("gelu_tanh")),
    "pass": Operation(
        2,
        lambda g, y: g.masked_fill(y <= 0, 0),
        lambda w, gg, out, g, y: [w("pass", gg, y), None],
        is_public=False,
    ),
    "share": Operation(
        3, _share, lambda w, gg, out, g, a, b: [w("share", gg, a, b), None, None], is_public=False
    ),
    "within": Operation(
        4,
        _within,
        lambda w, gg, out, g, a, low, high: [w("within", gg, a, low, high), None, None, None],
        is_public=False,
    ),
}
PUBLIC = tuple(name for name, operation in OPERATIONS.items() if operation.is_public)


# --- programs -------------------------------------------------------------------------------------


def written(steps: Sequence[Step], n_tensors: int) -> Chain:
    """The chain of these steps, whose last is its result; raises KernelArgumentError."""
    demand(len(steps) > 0, "a chain has at least one step")
    found: list[Written] = []
    for number, step in enumerate(steps):
        before = n_tensors + number - 1 if number else 0
        name, *operands = (step, before) if isinstance(step, str) else step
        _demand_fits(step, name, operands, n_tensors + number)
        found.append((str(name), tuple(operands)))  # type: ignore[arg-type]
    return Chain(tuple(found), (n_tensors + len(found) - 1,))


def _demand_fits(step: Step, name: object, operands: Sequence[object], n_values: int) -> None:
    if name not in PUBLIC:
        near = difflib.get_close_matches(str(name), PUBLIC, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        message = f"unknown operation {name!r}: one of {', '.join(PUBLIC)}.{hint}"
        raise KernelArgumentError(message)
    arity = OPERATIONS[str(name)].arity
    demand(len(operands) == arity, f"{name} takes {arity} operands, not {step!r}")
    for operand in operands:
        is_value = type(operand) is int and 0 <= operand < n_values
        demand(
            is_value or type(operand) is float,
            f"an operand is a float or one of the {n_values} values before it, not {operand!r} as "
            f"in {step!r}",
        )
    if name == "clamp":
        demand(
            type(operands[1]) is type(operands[2]) is float,
            f"clamp takes a value and two constants, not {step!r}",
        )


def computed(chain: Chain, tensors: Sequence[Tensor]) -> list[Tensor]:
    """In plain torch: the values that are wanted."""
    values = list(tensors)
    for name, operands in chain.steps:
        given = [_value(values, operand) for operand in operands]
        values.append(OPERATIONS[name].meaning(*given))
    return [values[number] for number in chain.outputs]


def _value(values: Sequence[Tensor], operand: Operand) -> Tensor:
    return values[operand] if isinstance(operand, int) else values[0].new_full((), operand)


def differentiated(chain: Chain, n_tensors: int, wanted: Sequence[int]) -> Chain:
    """The chain from (gradients of the outputs, tensors) to the gradients of these tensors.

    It computes the values again, then goes through the steps backwards.
    """
    n_gradients = len(chain.outputs)
    steps: list[Written] = [
        (name, tuple(_shifted(operand, n_gradients) for operand in operands))
        for name, operands in chain.steps
    ]
    first = n_gradients + n_tensors  # number of the first step's value

    def write(name: str, *operands: Operand) -> Operand:
        steps.append((name, operands))
        return first + len(steps) - 1

    gradients: dict[int, Operand] = {}

    def add(value: int, gradient: Operand) -> None:
        known = gradients.get(value)
        gradients[value] = gradient if known is None else write("add", known, gradient)

    for number, output in enumerate(chain.outputs):
        add(output + n_gradients, number)
    for number in reversed(range(len(chain.steps))):
        name, operands = steps[number]
        gradient = gradients.get(first + number)
        if gradient is None:
            continue
        rule = OPERATIONS[name].gradient
        if rule is None:
            raise NotImplementedError(f"{name} has no gradient: chains differentiate once there")
        for operand, part in zip(
            operands, rule(write, gradient, first + number, *operands), strict=True
        ):
            if isinstance(operand, int) and part is not None:
                add(operand, part)
    # What a tensor does not enter into leaves it a gradient of zero.
    found = [gradients.get(number + n_gradients) for number in wanted]
    outputs = [write("mul", 0.0, 0.0) if one is None else one for one in found]
    return Chain(tuple(steps), tuple(int(one) for one in outputs))


def _shifted(operand: Operand, by: int) -> Operand:
    return operand + by if isinstance(operand, int) else operand
