"""Sizes rounded up: many lengths, few programs, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_xla.debug import metrics

import kernel_dispatch
from tests.models.zoo import BY_NAME

LENGTHS = (3, 50)


def programs() -> int:
    return int(metrics.counter_value("UncachedCompile") or 0)


def _masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = LAYER(x).relu() * mask[..., None]
    return y.sum(1) / mask.sum(1, keepdim=True)


LAYER = nn.Linear(8, 4).eval()


@pytest.mark.parametrize(("buckets", "most"), [(True, 10), ([16, 64], 2)])
def test_fifty_lengths(buckets: Any, most: int) -> None:
    fast = torch.compile(
        _masked_mean, backend="unified", dynamic=True, options={"buckets": buckets}
    )
    before = programs()
    with torch.no_grad():
        for length in range(*LENGTHS):
            x, mask = torch.randn(2, length, 8), torch.rand(2, length).round()
            mask[:, 0] = 1
            torch.testing.assert_close(fast(x, mask), _masked_mean(x, mask))
    assert programs() - before <= most
    (graph,) = kernel_dispatch.report(fast)
    assert graph.runs_by_provider == {"torch_xla": len(range(*LENGTHS))}
    assert not graph.notes


def test_without_buckets_each_length_is_a_program() -> None:
    fast = torch.compile(_masked_mean, backend="unified", dynamic=True)
    before = programs()
    with torch.no_grad():
        for length in (3, 4, 5):
            x, mask = torch.randn(2, length, 8), torch.ones(2, length)
            torch.testing.assert_close(fast(x, mask), _masked_mean(x, mask))
    assert programs() - before == 3


def test_what_cannot_be_padded_says_why_and_is_right() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 0) + x.flip(0)

    fast = torch.compile(fn, backend="unified", dynamic=True, options={"buckets": True})
    for length in (3, 5, 6):
        x = torch.randn(length, 2)
        torch.testing.assert_close(fast(x), fn(x))
    (graph,) = kernel_dispatch.report(fast)
    assert any("compiled for each size" in note and "no buckets" in note for note in graph.notes)


def test_a_language_model_of_many_lengths() -> None:
    model = BY_NAME["decoder"].model()
    fast = torch.compile(model, backend="unified", dynamic=True, options={"buckets": True})
    before = programs()
    with torch.no_grad():
        for length in (4, 5, 6, 7, 9, 10, 11, 12, 13):
            ids = torch.randint(3, 200, (2, length))
            torch.testing.assert_close(
                fast(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5
            )
    graphs = kernel_dispatch.report(fast)
    assert all(set(graph.runs_by_provider) == {"torch_xla"} for graph in graphs)
    assert not [note for graph in graphs for note in graph.notes]
    assert programs() - before <= 5  # 4, 6, 8, 12, 16


def test_training_compiles_for_each_size() -> None:
    layer = nn.Linear(8, 4)
    fast = torch.compile(layer, backend="unified", dynamic=True, options={"buckets": True})
    for length in (3, 5):
        fast(torch.randn(length, 8)).sum().backward()
    (graph,) = kernel_dispatch.report(fast)
    assert graph.runs_by_provider == {"torch_xla": 2}
    assert any("need gradients" in note for note in graph.notes)
