"""What travels between the CPU and XLA's device, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernel_dispatch


def compiled(fn: Any, **kwargs: Any) -> Any:
    return torch.compile(fn, backend="unified", **kwargs)


def moved(fn: Any) -> int:
    return sum(graph.transfers for graph in kernel_dispatch.report(fn))


def ran(fn: Any) -> list[dict[str, int]]:
    return [graph.runs_by_provider for graph in kernel_dispatch.report(fn)]


def test_parameters_move_once() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    fast = compiled(model)
    x = torch.randn(3, 8)
    counts = []
    with torch.no_grad():
        for _ in range(3):
            before = moved(fast)
            torch.testing.assert_close(fast(x), model(x))
            counts.append(moved(fast) - before)
    assert counts == [4 + 1 + 1, 1 + 1, 1 + 1]  # the parameters, the input, the output
    assert ran(fast) == [{"torch_xla": 3}]


@pytest.mark.parametrize("how", ["in place", "data", "replaced data", "load_state_dict"])
def test_an_updated_weight_is_seen_and_only_it_moves(how: str) -> None:
    model = nn.Linear(8, 4).eval()
    fast = compiled(model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        fast(x)
        before = moved(fast)
        if how == "in place":
            model.weight.mul_(2)
        elif how == "data":
            model.weight.data.mul_(2)
        elif how == "replaced data":
            model.weight.data = torch.randn(4, 8)
        else:
            other = nn.Linear(8, 4).state_dict()
            model.load_state_dict({**other, "bias": model.bias})
        torch.testing.assert_close(fast(x), model(x))
    # load_state_dict writes into the bias as well, if only what it was.
    assert moved(fast) - before == (4 if how == "load_state_dict" else 3)


def test_two_graphs_share_a_parameter_that_moved() -> None:
    model = nn.Linear(8, 8).eval()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y)

    fast = compiled(fn)
    with torch.no_grad():
        x = torch.randn(2, 8)
        torch.testing.assert_close(fast(x), fn(x))
    assert ran(fast) == [{"torch_xla": 1}, {"torch_xla": 1}]
    assert moved(fast) == 2 + 2 + 2  # weight and bias once; an input and an output for each graph


def test_training_gives_eagers_weights() -> None:
    def train(call: Any, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(6, 3, 8, 8, generator=generator)
            loss = call(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    models = [_convolutional(), _convolutional()]
    models[1].load_state_dict(models[0].state_dict())
    fast = compiled(models[0])
    train(fast, models[0])
    train(models[1], models[1])
    for key, value in models[1].state_dict().items():  # running statistics among them
        torch.testing.assert_close(models[0].state_dict()[key], value, rtol=2e-3, atol=2e-4)
    assert ran(fast) == [{"torch_xla": 4}]


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 2),
    ).train()  # fmt: skip


def test_a_written_input_is_written_at_home() -> None:
    def fn(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x)
        return state.sum()

    fast = compiled(fn)
    x, mine, own = torch.randn(4), torch.ones(4), torch.ones(4)
    for _ in range(2):
        torch.testing.assert_close(fast(x, mine), fn(x, own))
    torch.testing.assert_close(mine, own)
    assert ran(fast) == [{"torch_xla": 2}]


def test_outputs_that_are_inputs_and_views() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = x + 1
        return x, y[0], y, x.t(), x.clone(), x.detach(), 3

    fast = compiled(fn)
    x = torch.randn(3, 4)
    got, own = fast(x), fn(x)
    torch.testing.assert_close(got, own)
    assert got[0] is x
    assert got[3].data_ptr() == x.data_ptr() and got[4].data_ptr() != x.data_ptr()


def test_a_seed_gives_the_same_numbers_again() -> None:
    fast = compiled(lambda x: torch.dropout(x, 0.5, True))
    x = torch.ones(64)
    torch.manual_seed(3)
    first, second = fast(x), fast(x)
    torch.manual_seed(3)
    again = fast(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 2.0}


def test_dtypes_come_home_as_they_would_be() -> None:
    def fn(x: torch.Tensor) -> Any:
        values, places = torch.max_pool1d_with_indices(x, 2)
        return values, places, x.argmax(-1), x.double().sum(), x.to(torch.bfloat16), x > 0

    fast = compiled(fn)
    x = torch.randn(1, 2, 8)
    torch.testing.assert_close(fast(x), fn(x))
    assert ran(fast) == [{"torch_xla": 1}]


def test_tensors_on_the_device_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    monkeypatch.delenv("UNIFIED_DEVICE")
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(3, 8)
    own = model(x)
    own.sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    there = model.to(torch_xla.device())
    fast = compiled(there)
    got = fast(x.to(torch_xla.device()))
    got.sum().backward()
    assert got.device.type == "xla"
    torch.testing.assert_close(got.cpu(), own, rtol=1e-5, atol=1e-6)
    grads = [p.grad.cpu() for p in there.parameters() if p.grad is not None]
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
    (graph,) = kernel_dispatch.report(fast)
    assert (graph.target, graph.runs_by_provider, graph.transfers) == ("xla", {"torch_xla": 1}, 0)
    assert not graph.fallbacks


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_levels(level: str) -> None:
    model = nn.Linear(8, 4).eval()
    fast = compiled(model, options={"level": level})
    with torch.no_grad():
        x = torch.randn(3, 8)
        torch.testing.assert_close(fast(x), model(x))
    assert ran(fast) == [{"eager" if level == "O0" else "torch_xla": 1}]
    assert [graph.target for graph in kernel_dispatch.report(fast)] == ["xla"]


def test_many_sizes_of_a_dynamic_graph() -> None:
    model = nn.Linear(8, 4).eval()
    fast = compiled(lambda x: model(x).softmax(0) * x.shape[0], dynamic=True)
    with torch.no_grad():
        for size in (3, 5, 9, 5, 3):
            x = torch.randn(size, 8)
            torch.testing.assert_close(fast(x), model(x).softmax(0) * size)
    assert ran(fast) == [{"torch_xla": 5}]


def test_what_passes_through_gives_its_memory_and_parameters_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch_xla import _XLAC

    given: list[tuple[int, ...]] = []
    donate = _XLAC._set_buffer_donation

    def watched(tensor: torch.Tensor, value: bool) -> bool:
        given.append(tuple(tensor.shape))
        return bool(donate(tensor, value))

    monkeypatch.setattr(_XLAC, "_set_buffer_donation", watched)
    layer = nn.Linear(8, 8).eval()

    def fn(x: torch.Tensor, weight: torch.Tensor, same: torch.Tensor) -> Any:
        return layer(x) @ weight, same

    fast = compiled(fn)
    x, same = torch.randn(3, 8), torch.randn(2)
    with torch.no_grad():
        for weight in (torch.randn(8, 8), layer.weight, layer.weight):
            torch.testing.assert_close(fast(x, weight, same), fn(x, weight, same))
    assert (3, 8) in given and (2,) not in given
    assert given.count((8, 8)) <= 1 + len(kernel_dispatch.report(fast))
    assert all(set(one) == {"torch_xla"} for one in ran(fast))
