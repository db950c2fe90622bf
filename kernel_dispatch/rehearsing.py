"""One call of a function, over and over from the same state, on copies of its inputs.

What the call writes into (inputs, weights, buffers) is put back before every run, so that runs can
be compared and the caller finds everything as it was. Gradients are those of the caller's mode:
where the outputs require them, a run is forward and backward; `.grad` is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kernel_dispatch.bench.stepping import fixed_cotangents, tensors_of
from kernel_dispatch.callables import origin
from kernel_dispatch.numerics import all_in_double, to_reference


class CannotRehearse(Exception):
    """Runs of this function cannot be made alike, so nothing can be compared; says why."""


class Rehearsal:
    """`fn` is what is called; `module` holds the weights and buffers that it may write into.

    `written` are the positions in `tensors()` that a call writes into, and `before` what they hold
    when a run begins; `others` are leaves that get gradients and are none of `tensors()`, such as
    the weights of a module that a plain function calls. All of them come from `rehearsed`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        module: nn.Module | None,
        written: Sequence[int] = (),
        before: Sequence[Tensor] = (),
        others: Sequence[Tensor] = (),
    ) -> None:
        self.fn = fn
        self.module = module
        self.training = False
        self.args, self.kwargs = copied(inputs)
        self._written = tuple(written)
        self._before = tuple(before)
        self._others = tuple(others)
        self._gradients: list[Tensor] = []
        self._cotangents: list[Tensor] | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Weights, buffers and inputs."""
        yield from state_of(self.module, (self.args, self.kwargs))

    def run(self) -> list[Any]:
        """Outputs, then what was written, then gradients."""
        self.put_back()
        outputs = self.call()
        state = list(self.tensors())
        return [outputs, [state[i] for i in self._written], self._gradients]

    def put_back(self) -> None:
        if not self._written:
            return
        state = list(self.tensors())
        with torch.no_grad():
            for i, kept in zip(self._written, self._before, strict=True):
                state[i].detach().copy_(kept)

    def call(self) -> Any:
        """What is timed: nothing but the user's call, and its backward where it has one."""
        outputs = self.fn(*self.args, **self.kwargs)
        roots = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
        self.training = bool(roots)
        self._gradients = self._backward(roots) if roots else []
        return outputs

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def writes(self) -> bool:
        return bool(self._written)

    def in_double(self) -> Any:
        """The same run in float64, on a copy: the truth for every candidate."""
        fn: Any = copy.deepcopy(self.fn)
        module = module_of(fn)
        if module is not None:
            module.double()
        inputs = to_reference((self.args, self.kwargs))
        before = to_reference(list(self._before))
        wide = Rehearsal(fn, inputs, module, self._written, before, self._others)
        with all_in_double():
            return wide.run()

    def _backward(self, roots: list[Tensor]) -> list[Tensor]:
        if self._cotangents is None:
            self._cotangents = fixed_cotangents(roots)
        wanted = [t for t in self.tensors() if t.requires_grad and t.is_leaf]
        wanted += self._others
        if not wanted:
            return []  # the first run, which is there to find them
        found = torch.autograd.grad(roots, wanted, self._cotangents, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def _leaves(roots: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """What gradients of these arrive at, apart from the known ones, in an order that repeats."""
    seen: dict[Any, None] = {}
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [below for below, _ in node.next_functions if below is not None]
    found = [node.variable for node in seen if hasattr(node, "variable")]
    ours = {id(tensor) for tensor in known}
    return [tensor for tensor in found if id(tensor) not in ours]


@dataclass(frozen=True)
class Rehearsed:
    """What a first run has shown."""

    step: Rehearsal  # on a copy of the function
    written: tuple[int, ...]
    before: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


def rehearsed(fn: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Rehearsed:
    """A first run, on a copy of everything: the caller's own tensors are not touched."""
    own = module_of(fn)
    try:
        twin: Any = copy.deepcopy(fn) if own is not None else fn
    except Exception as error:  # noqa: BLE001  (whatever a module does when it is copied)
        name = type(own).__name__
        raise CannotRehearse(f"{name} cannot be copied ({type(error).__name__}: {error})") from None
    first = Rehearsal(twin, inputs, module_of(twin))
    state = list(first.tensors())
    marks = [_mark(tensor) for tensor in state]
    outputs = first.call()
    after = list(first.tensors())
    if len(after) != len(state) or any(a is not b for a, b in zip(state, after, strict=True)):
        raise CannotRehearse("a call replaces tensors of the module, which cannot be put back")
    written = tuple(i for i, mark in enumerate(marks) if _changed(state[i], mark))
    originals = list(state_of(own, inputs))
    before = tuple(originals[i].detach().clone() for i in written)
    roots = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
    others = tuple(_leaves(roots, state))
    step = Rehearsal(twin, inputs, module_of(twin), written, before, others)
    return Rehearsed(step, written, before, others)


class Unchanged:
    """Remembers what a call has to leave alone."""

    def __init__(self, rehearsal: Rehearsal, written: Sequence[int]) -> None:
        self._rehearsal = rehearsal
        self._marks = {i: _mark(t) for i, t in enumerate(rehearsal.tensors()) if i not in written}

    def broken(self) -> int | None:
        """The position of a tensor that was written into, though eager does not. Put back."""
        state = list(self._rehearsal.tensors())
        broken = [i for i, mark in self._marks.items() if _changed(state[i], mark)]
        with torch.no_grad():
            for i in broken:
                mark = self._marks[i]
                if isinstance(mark, Tensor):
                    state[i].detach().copy_(mark)
        return broken[0] if broken else None


def module_of(fn: Any) -> nn.Module | None:
    """The module whose weights a call uses: of a module itself, or of a method of one."""
    owner = origin(fn)
    return owner if isinstance(owner, nn.Module) else None


def state_of(module: nn.Module | None, inputs: Any) -> Iterator[Tensor]:
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()
    yield from tensors_of(inputs)


def copied(tree: Any) -> Any:
    """Tensors as tensors of their own; one that is given twice stays one, parameters stay so."""
    made: dict[int, Tensor] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        if id(leaf) not in made:
            fresh = leaf.detach().clone()
            is_parameter = isinstance(leaf, nn.Parameter)
            made[id(leaf)] = (
                nn.Parameter(fresh, leaf.requires_grad)
                if is_parameter
                else fresh.requires_grad_(leaf.requires_grad)
            )
        return made[id(leaf)]

    return pytree.tree_map(copy_leaf, tree)


def _mark(tensor: Tensor) -> int | Tensor:
    """The values; of a parameter, which may be large, the version counter.

    Buffers need their values: eager's BatchNorm writes its statistics without counting it.
    """
    counted = isinstance(tensor, nn.Parameter) and not tensor.is_inference()
    return tensor._version if counted else tensor.detach().clone()


def _changed(tensor: Tensor, mark: int | Tensor) -> bool:
    if not isinstance(mark, Tensor):
        return tensor._version != mark
    return not bool(((tensor == mark) | ((tensor != tensor) & (mark != mark))).all())
