"""The levels O0-O3 beside eager and Inductor, on a transformer block, a CNN and a tiny graph.

Every contender's output is checked against float64 before it is timed. The figures of one run are
comparable with each other; the demo interleaves its contenders, which is fairer on a noisy machine.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contenders import LEVELS, relative_error


def transformer_block() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return layer.train(), torch.randn(2, 128, 256)  # train(): the fast path of nn is not captured


def cnn() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10)).eval(), torch.randn(
        4, 3, 64, 64
    )


class FiveOps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).relu() * x.cos() - 0.5


def five_ops() -> tuple[nn.Module, torch.Tensor]:
    return FiveOps(), torch.randn(64)


WORKLOADS = {"transformer_block": transformer_block, "cnn": cnn, "five_ops": five_ops}
CONTENDERS = ("eager", "inductor", *LEVELS)


def compiled(model: nn.Module, contender: str) -> Any:
    if contender == "eager":
        return model
    if contender == "inductor":
        return torch.compile(model)
    return torch.compile(model, backend="unified", options={"level": contender})


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_levels(benchmark: Any, workload: str, contender: str) -> None:
    benchmark.group = workload
    model, x = WORKLOADS[workload]()
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(x.double())
        allowed = 2 * relative_error(model(x), reference) + 4 * torch.finfo(x.dtype).eps
        run = compiled(model, contender)
        error = relative_error(run(x), reference)
        assert error <= allowed, f"{contender} is wrong: {error} > {allowed}"
        benchmark.extra_info["error_against_float64"] = error
        benchmark(run, x)
