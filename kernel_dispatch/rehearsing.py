"""One call of a function, over and over from the same state, on copies of its inputs.

What the call writes into (inputs, weights, buffers) is put back before every run, so that runs can
be compared and the caller finds everything as it was. Gradients are those of the caller's mode:
where the outputs require them, a run is forward and backward; `.grad` is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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
    when a run begins; both come from `rehearsed`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        module: nn.Module | None,
        written: Sequence[int] = (),
        before: Sequence[Tensor] = (),
    ) -> None:
        self.fn = fn
        self.module = module
        self.training = False
        self.args, self.kwargs = copied(inputs)
        self._written = tuple(written)
        self._before = tuple(before)
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
        wide = Rehearsal(fn, inputs, module, self._written, to_reference(list(self._before)))
        with all_in_double():
            return wide.run()

    def _backward(self, roots: list[Tensor]) -> list[Tensor]:
        if self._cotangents is None:
            self._cotangents = fixed_cotangents(roots)
        wanted = [t for t in self.tensors() if t.requires_grad and t.is_leaf]
        found = torch.autograd.grad(roots, wanted, self._cotangents, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def rehearsed(
    fn: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[Rehearsal, tuple[int, ...], tuple[Tensor, ...]]:
    """A first run on a copy of everything: the rehearsal, what the call writes into, and what was
    there before. The caller's own tensors are not touched."""
    own = module_of(fn)
    try:
        twin: Any = copy.deepcopy(fn) if own is not None else fn
    except Exception as error:  # noqa: BLE001  (whatever a module does when it is copied)
        name = type(own).__name__
        raise CannotRehearse(f"{name} cannot be copied ({type(error).__name__}: {error})") from None
    first = Rehearsal(twin, inputs, module_of(twin))
    state = list(first.tensors())
    marks = [_mark(tensor) for tensor in state]
    first.call()
    after = list(first.tensors())
    if len(after) != len(state) or any(a is not b for a, b in zip(state, after, strict=True)):
        raise CannotRehearse("a call replaces tensors of the module, which cannot be put back")
    written = tuple(i for i, mark in enumerate(marks) if _changed(state[i], mark))
    originals = list(state_of(own, inputs))
    before = tuple(originals[i].detach().clone() for i in written)
    return Rehearsal(twin, inputs, module_of(twin), written, before), written, before


class Unchanged:
    """Remembers what a call has to leave alone."""

    def __init__(self, rehearsal: Rehearsal, written: Sequence[int]) -> None:
        self._rehearsal = rehearsal
        self._marks = {i: _mark(t) for i, t in enumerate(rehearsal.tensors()) if i not in written}

    def broken(self) -> int | None:
        """The position of a tensor that was written into, though eager does not."""
        state = list(self._rehearsal.tensors())
        return next((i for i, mark in self._marks.items() if _changed(state[i], mark)), None)


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
    """The version counter, or, where torch keeps none, the values."""
    return tensor.detach().clone() if tensor.is_inference() else tensor._version


def _changed(tensor: Tensor, mark: int | Tensor) -> bool:
    if isinstance(mark, Tensor):
        return not torch.equal(tensor.nan_to_num(), mark.nan_to_num())
    return tensor._version != mark
