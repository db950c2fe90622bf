"""Checkpoints of activations, and parts that are compiled once: gradients as without a compiler,
whoever runs the graph."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.support.compiling import compile_at
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.reports import assert_ran_as_planned

LEVELS = ("O0", "O1", "O2")


class Dropped(nn.Module):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) * x.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class WithStatistics(nn.Module):
    """A checkpoint in a checkpoint; buffers are written, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6))
        self.register_buffer("seen", torch.zeros(2, 3))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.view(-1)[:1].add_(1)
        return self.body(x)

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.sin(), use_reentrant=False).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.outer, x, use_reentrant=False) + x


def _saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _saves_products)


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False, context_fn=_CONTEXTS)


def _step(run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    result = run(x)
    (result * torch.linspace(0.5, 1.5, 6, dtype=x.dtype)).sum().backward()
    model = getattr(run, "_orig_mod", run)
    grads = [parameter.grad for parameter in model.parameters()]
    return [result.detach(), x.grad, *grads]


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_is_of_the_numbers_that_the_result_was_computed_with(level: str) -> None:
    compiled = compile_at(level, Dropped())
    x = (torch.rand(64, 64) + 0.1).requires_grad_()
    result = compiled(x)
    result.sum().backward()
    assert_bit_identical(x.grad == 0, result == 0, f"what dropout left out at {level}")
    assert 0.4 < (result == 0).float().mean() < 0.6
    assert_ran_as_planned(compiled, level)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [WithStatistics, Selective])
def test_a_training_step(make: Callable[[], nn.Module], level: str) -> None:
    model, x = make(), torch.randn(5, 6)
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = compile_at(level, model)
    got, own, reference = _step(compiled, x), _step(twin, x), _step(wide, x.double())
    if level == "O0":
        assert_bit_identical(got, own, "a training step")
    assert_contract(got, own, reference, f"a training step at {level}")
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_body_writes_its_buffers_as_often_as_without_a_compiler(level: str) -> None:
    """AOTAutograd, at O2, takes the writes out of what is computed again."""
    model, x = WithStatistics(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    _step(compile_at(level, model), x)
    _step(twin, x)
    assert_bit_identical(dict(model.named_buffers()), dict(twin.named_buffers()), level)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_what_a_checkpoint_was_given_must_not_be_written(level: str) -> None:
    """It would be computed again from the new numbers; as without a compiler autograd says so."""

    def body(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale.add_(1)
        return (x * scale).sin()

    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x, scale, use_reentrant=False)

    for run in (function, compile_at(level, function)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(torch.randn(3, requires_grad=True), torch.ones(3)).sum().backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x, 0.5))[0].pow(2)


class Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [Alone, Recurrent])
def test_the_same_numbers_without_gradients_and_with_them(
    make: Callable[[], nn.Module], level: str
) -> None:
    """A checkpoint of the older kind, around compiled code, relies on it."""
    compiled = compile_at(level, make())
    x = (torch.rand(8, 64, 32) + 0.1).requires_grad_()
    torch.manual_seed(3)
    with torch.no_grad():
        expected = compiled(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-5)
    torch.manual_seed(3)
    checkpoint(compiled, x, use_reentrant=True).sum().backward()
    again = x.detach().requires_grad_()
    torch.manual_seed(3)
    compiled(again).sum().backward()
    assert_bit_identical(x.grad == 0, again.grad == 0, "what dropout left out")


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).sin()


@pytest.mark.parametrize("level", LEVELS)
def test_parts_that_are_compiled_once(level: str) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _region(_region(x, weight), weight) + _region(x, weight)

    tensors = torch.randn(4, 4), torch.randn(4, 4)
    results = []
    compiled = compile_at(level, function)
    for run, dtype in ((compiled, None), (function, None), (function, torch.double)):
        leaves = [one.to(dtype or one.dtype).clone().requires_grad_() for one in tensors]
        result = run(*leaves)
        result.sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert_contract(*results, f"a nested region at {level}")
    assert_ran_as_planned(compiled, level)
