"""A size that is the number in a tensor is known to torch alone, which runs such a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.compiling import compile_at
from tests.support.regions import hold
from tests.support.reports import fallbacks_of, graph_reports

Tensor = torch.Tensor


def _padded(x: Tensor, size: Tensor) -> Tensor:
    return functional.pad(x, (0, size), mode="reflect") * 2


def _enlarged(x: Tensor, size: Tensor) -> Tensor:
    return functional.interpolate(x[None, None], (size, size), mode="bilinear") * 2


def _behind_a_layer(x: Tensor, size: Tensor) -> Tensor:
    layer = functional.conv1d(x[None], torch.ones(4, 3, 3, dtype=x.dtype))
    return functional.pad(layer, (size, 0)) + 1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("function", [_padded, _enlarged, _behind_a_layer])
def test_torch_runs_it(function: Callable[[Tensor, Tensor], Tensor], level: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, size: Tensor) -> Tensor:
            return function(x, size)

    model = Model().eval()
    compiled = compile_at(level, model, options={"strict": True}, dynamic=False)
    for size in (3, 2):
        hold(compiled, model, torch.randn(3, 64), torch.tensor(size), where=str(size))
    (graph,) = graph_reports(compiled)
    assert graph.as_dict()["provider"] == "eager"
    assert not fallbacks_of(compiled)
    if level == "O2":
        assert "inductor does not take sizes that are tensors" in str(graph.as_dict())
