"""Where XLA's picture of tensors is not torch's: scalars, strides, shared memory, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch


def compiled(fn: Any, **kwargs: Any) -> Any:
    return torch.compile(fn, backend="unified", **kwargs)


def ran_there(fn: Any) -> bool:
    return all(set(g.runs_by_provider) == {"torch_xla"} for g in kernel_dispatch.report(fn))


def test_scalars_that_are_equal_only_now() -> None:
    fast = compiled(lambda x, a, b: x * a + b * 2.0)
    x = torch.randn(4)
    for a, b in ((2.0, 2.0), (2.0, 3.0), (5.0, 2.0)):
        torch.testing.assert_close(fast(x, torch.tensor(a), torch.tensor(b)), x * a + b * 2.0)
    assert ran_there(fast)


def test_scalar_parameters_that_start_equal() -> None:
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (nn.Parameter(torch.tensor(2.0)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.shift

    def trained(wrap: Callable[[Any], Any]) -> list[float]:
        model = Affine()
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = (call(torch.arange(4.0)) - step).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [parameter.item() for parameter in model.parameters()]

    assert trained(compiled) == pytest.approx(trained(lambda model: model), rel=1e-4)


@pytest.mark.parametrize(
    "fn",
    [lambda x: (x * 2)[-1], lambda x: (x * 2)[-2:], lambda x: x[x.shape[0] // 2] * 2],
    ids=["last", "last two", "middle"],
)
def test_a_length_that_equals_a_number_of_the_graph(fn: Any) -> None:
    fast = compiled(fn, dynamic=True, options={"buckets": True})
    for length in (5, 6, 5, 7):
        x = torch.randn(length, 3)
        torch.testing.assert_close(fast(x), fn(x))
    assert ran_there(fast)


@pytest.mark.parametrize(
    "share",
    [
        lambda p: (p[1:, 1:], p[2]),
        lambda p: (p.t()[1:], p[1]),
        lambda p: (p[1:], p[1]),
    ],
    ids=["offset", "transposed", "rows"],
)
def test_inputs_that_share_memory_and_are_written(share: Any) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    fast = compiled(fn)
    mine, own = (torch.arange(12.0).view(3, 4) for _ in range(2))
    torch.testing.assert_close(fast(*share(mine)), fn(*share(own)))
    torch.testing.assert_close(mine, own)
    assert ran_there(fast)


def test_as_strided_of_what_does_not_lie_row_by_row_stays_at_home() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 3)) + 1

    fast = compiled(fn)
    x = torch.randn(4, 3).t()
    with pytest.warns(UserWarning, match="does not lie row by row"):
        torch.testing.assert_close(fast(x), fn(x))


def test_layouts_come_home() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = x.transpose(1, 2).exp()
        return y, y.transpose(1, 2).view(2, -1), y[1:]

    fast = compiled(fn)
    x = torch.randn(2, 3, 4)
    got, own = fast(x), fn(x)
    torch.testing.assert_close(got, own)
    assert got[0].stride() == own[0].stride()
    conv = compiled(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).eval())
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert conv(image).permute(0, 2, 3, 1).reshape(-1, 4).shape == (72, 4)


def test_cpu_tensors_beside_tensors_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    monkeypatch.delenv("UNIFIED_DEVICE")
    x = torch.randn(4)
    there = x.to(torch_xla.device())
    fast = compiled(lambda x, s: x * s)
    for value in (2.0, 3.0):
        torch.testing.assert_close(fast(there, torch.tensor(value)).cpu(), x * value)
    home = compiled(lambda x: (x + 1).cpu() * 2)
    got = home(there)
    assert got.device.type == "cpu"
    torch.testing.assert_close(got, (x + 1) * 2)
    assert ran_there(fast) and ran_there(home)


@pytest.mark.parametrize("buckets", [None, True])
def test_new_sizes_in_several_threads(buckets: Any) -> None:
    layer = nn.Linear(8, 4).eval()
    fast = compiled(lambda x: layer(x).relu().sum(0), dynamic=True, options={"buckets": buckets})
    failed: list[BaseException] = []

    def work(lengths: range) -> None:
        try:
            for length in lengths:
                x = torch.randn(length, 8)
                with torch.no_grad():
                    torch.testing.assert_close(fast(x), layer(x).relu().sum(0))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    work(range(3, 6))
    threads = [threading.Thread(target=work, args=(range(6 + i, 30, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert ran_there(fast)
    assert not [f for graph in kernel_dispatch.report(fast) for f in graph.fallbacks]
