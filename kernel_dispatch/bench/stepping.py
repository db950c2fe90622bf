"""One call of a case: forward, or forward and backward, with or without gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kernel_dispatch.bench.workload import Case
from kernel_dispatch.numerics import all_in_double, to_reference


class Step:
    """`run()` calls `fn` (the case's own, or what a contender made of it) once.

    In training it returns the outputs and then the gradients of the parameters, or, where there
    are none, of the floating inputs: for fixed random cotangents, since the sum of a normalised
    output has no gradient.
    """

    def __init__(self, case: Case, training: bool, fn: Callable[..., Any] | None = None) -> None:
        self.case = case
        self.training = training
        self.fn = case.fn if fn is None else fn
        self._cotangents: list[torch.Tensor] | None = None
        if training:
            _prepare_gradients(case)

    def run(self) -> Any:
        if not self.training:
            with torch.no_grad():
                return self.fn(*self.case.args, **self.case.kwargs)
        with torch.enable_grad():
            for tensor in self._trained():
                tensor.grad = None
            outputs = self.fn(*self.case.args, **self.case.kwargs)
            roots = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
            if not roots:
                raise RuntimeError("nothing in its outputs requires a gradient: no training step")
            torch.autograd.backward(roots, self._fixed_cotangents(roots))
        return [outputs, self.gradients()]

    def gradients(self) -> list[torch.Tensor]:
        return [tensor.grad for tensor in self._trained() if tensor.grad is not None]

    def with_fn(self, fn: Callable[..., Any]) -> Step:
        return Step(self.case, self.training, fn)

    def in_double(self) -> Any:
        """The same call in float64, on a copy: the reference for every contender."""
        fn: Any = copy.deepcopy(self.case.fn)
        if isinstance(fn, nn.Module):
            fn = fn.double()
        args, kwargs = to_reference((copied(self.case.args), copied(dict(self.case.kwargs))))
        wide = Step(Case(fn, args, kwargs), self.training)
        with all_in_double():
            return wide.run()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights, buffers and inputs."""
        if isinstance(self.case.fn, nn.Module):
            yield from self.case.fn.parameters()
            yield from self.case.fn.buffers()
        yield from tensors_of((self.case.args, dict(self.case.kwargs)))

    def parameters(self) -> list[nn.Parameter]:
        fn = self.case.fn
        return list(fn.parameters()) if isinstance(fn, nn.Module) else []

    def _trained(self) -> list[torch.Tensor]:
        parameters: list[torch.Tensor] = [p for p in self.parameters() if p.requires_grad]
        return parameters or [t for t in self.tensors() if t.requires_grad and t.is_leaf]

    def _fixed_cotangents(self, roots: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._cotangents is None:
            self._cotangents = fixed_cotangents(roots)
        return self._cotangents


def fixed_cotangents(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Random and the same in every run; whole numbers over 64, so that bfloat16 has them too."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(-127, 128, root.shape, generator=generator) for root in roots)
    return [one.to(root.device, root.dtype) / 64 for one, root in zip(drawn, roots, strict=True)]


def _prepare_gradients(case: Case) -> None:
    if isinstance(case.fn, nn.Module):
        case.fn.train()
        if any(True for _ in case.fn.parameters()):
            return
    for tensor in tensors_of((case.args, dict(case.kwargs))):
        if tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Also those in dataclasses that torch's trees know nothing of."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of(list(vars(leaf).values()))
    return found


def copied(tree: Any) -> Any:
    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy_leaf, tree)
