"""What XLA lacks: split off with the reason, computed by torch, said once, an error if strict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch
from lowering.errors import StrictModeError, UnifiedWarning

CALLS: list[int] = []


@torch.library.custom_op("lane::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    """Looks at its data, and is called each time."""
    CALLS.append(int(x.numel()))
    return x * float(x.max() > 0)


@count.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _fallbacks(fn: Any) -> list[str]:
    return [f.reason.text for graph in kernel_dispatch.report(fn) for f in graph.fallbacks]


def test_an_operator_between_two_programs() -> None:
    first, second = nn.Linear(8, 8).eval(), nn.Linear(8, 4).eval()

    def fn(x: torch.Tensor) -> Any:
        y = first(x).relu()
        z = torch.special.bessel_j0(y)
        return second(z + y), y.clone(), z

    fast = torch.compile(fn, backend="unified")
    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.warns(UnifiedWarning, match="special_bessel_j0"):
        for _ in range(2):
            torch.testing.assert_close(fast(x), fn(x))
            x = torch.randn(3, 8)
    (graph,) = kernel_dispatch.report(fast)
    assert graph.runs_by_provider == {"torch_xla": 2}
    (fallback,) = graph.fallbacks
    assert (fallback.provider, fallback.taken_by) == ("torch_xla", "eager")
    assert fallback.reason.code == "op-unsupported" and "bessel_j0" in fallback.reason.text
    assert fallback.reason.place.split(":")[0].endswith("test_lacking.py")


def test_its_gradient() -> None:
    layer = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(layer(x)[None, None], GRID).sum()

    GRID = torch.rand(1, 3, 3, 2) - 0.5
    fast = torch.compile(fn, backend="unified")
    x = torch.randn(4, 4)
    with pytest.warns(UnifiedWarning, match="grid_sampler"):
        fast(x).backward()
    got = layer.weight.grad.clone()  # type: ignore[union-attr]
    layer.zero_grad()
    fn(x).backward()
    torch.testing.assert_close(got, layer.weight.grad)
    assert any("grid_sampler_2d_backward" in text for text in _fallbacks(fast))


def test_somebody_elses_operator_is_called_each_time() -> None:
    fast = torch.compile(lambda x: count(x + 1) * 2, backend="unified")
    CALLS.clear()
    with pytest.warns(UnifiedWarning, match=r"lane\.count"):
        fast(torch.zeros(3))
    first = len(CALLS)
    torch.testing.assert_close(fast(-torch.ones(3) * 3), torch.zeros(3) * -1)
    torch.testing.assert_close(fast(torch.ones(3)), torch.full((3,), 4.0))
    assert len(CALLS) == first + 2


def test_strict_makes_it_an_error() -> None:
    fast = torch.compile(
        lambda x: torch.special.bessel_j0(x + 1), backend="unified", options={"strict": True}
    )
    with pytest.raises(StrictModeError, match="bessel_j0"):
        fast(torch.randn(3))
    # What was recorded on the way to the error is gone: the next graph is sound.
    other = torch.compile(lambda x: (x * 2).sum(), backend="unified")
    torch.testing.assert_close(other(torch.ones(3)), torch.tensor(6.0))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_the_data_decides() -> None:
    fast = torch.compile(lambda x: x.nonzero() * 2, backend="unified")
    x = torch.tensor([0.0, 1.0, 2.0])
    with pytest.warns(UnifiedWarning, match="depends on the data"):
        torch.testing.assert_close(fast(x), x.nonzero() * 2)
    (graph,) = kernel_dispatch.report(fast)
    assert graph.runs_by_provider == {"eager": 1}
