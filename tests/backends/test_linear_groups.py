"""Linear layers of one input become one call; what depends on another of them stays its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_dispatch import profiling
from lowering.native import library
from tests.support.compiling import every_row_applies
from tests.support.modules import Of
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    hold,
    no_cached_graphs,
)

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies(), no_cached_graphs():
        yield


def compiled_of(model: nn.Module, **kwargs: Any) -> Any:
    return compile_in("O2 openmp", model, **kwargs)


def calls(compiled: Any, *inputs: Tensor) -> list[str]:
    """The linear operators of ours that one call runs."""
    with torch.no_grad(), torch.profiler.profile(activities=profiling.activities()) as profile:
        compiled(*inputs)
    names = [event.key for event in profile.key_averages() for _ in range(event.count)]
    ours = [name.removeprefix("kernel_dispatch::") for name in names if "kernel_dispatch" in name]
    return sorted(name for name in ours if "linear" in name)


def layers(*names: str, inner: int = 24, outer: int = 40) -> dict[str, nn.Module]:
    return {name: nn.Linear(inner, outer) for name in names}


def test_query_key_and_value() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 9, 4, 10).transpose(1, 2) for layer in (m.q, m.k, m.v))
        return functional.scaled_dot_product_attention(q, k, v)

    model, x = Of(attend, **layers("q", "k", "v")), torch.randn(2, 9, 24)
    compiled = compiled_of(model)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_linears"]
    assert details(compiled, "linear") == ["with shared_input"]
    assert_regions(compiled, ("linear", "openmp", 3, 6), ("attention", "mha", 1, 2))


def gate_first(m: Any, x: Tensor) -> Tensor:
    return m.down(functional.silu(m.gate(x)) * m.up(x))


def gate_last(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x) * functional.silu(m.gate(x)))


def with_a_residual(m: Any, x: Tensor) -> Tensor:
    return m.down(functional.silu(m.gate(x)) * m.up(x)) + x


@pytest.mark.parametrize("function", [gate_first, gate_last, with_a_residual])
def test_a_gated_block(function: Any) -> None:
    model = Of(function, **layers("gate", "up"), down=nn.Linear(40, 24, bias=False))
    compiled, x = compiled_of(model), torch.randn(3, 5, 24)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_gated_linear", "openmp_linear"]
    assert "shared_input" in details(compiled, "linear")[0]
    assert_regions(compiled, ("linear", "openmp", 3, 6))


def gate_is_returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate = functional.silu(m.a(x))
    return gate * m.b(x), gate


def each_gates_the_next(m: Any, x: Tensor) -> Tensor:
    return m.c(x) * functional.silu(m.b(x) * torch.tanh(m.a(x)))


def one_is_added_to_the_next(m: Any, x: Tensor) -> Tensor:
    return m.b(x) + m.a(x)


def one_gates_itself(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    return a * a + m.b(x) * m.c(x)


def what_lies_between(m: Any, x: Tensor) -> Tensor:
    """The second has an addend that the first is needed for; the third does not."""
    softened = torch.softmax(m.a(x), -1)
    return m.b(x) + softened + m.c(x)


@pytest.mark.parametrize(
    "function",
    [
        gate_is_returned,
        each_gates_the_next,
        one_is_added_to_the_next,
        one_gates_itself,
        what_lies_between,
    ],
)
def test_layers_that_need_each_other(function: Any) -> None:
    model = Of(function, **layers("a", "b", "c"))
    compiled, x = compiled_of(model), torch.randn(6, 24)
    hold(compiled, model, x)
    count = 2 if function in (gate_is_returned, one_is_added_to_the_next) else 3
    softmax = [("softmax", "openmp", 1, 1)] if function is what_lies_between else []
    assert_regions(compiled, ("linear", "openmp", count, count), *softmax)


def test_other_inputs_are_other_calls() -> None:
    model = Of(lambda m, x, y: (m.a(x), m.b(y), m.c(x + y)), **layers("a", "b", "c"))
    compiled, inputs = compiled_of(model), (torch.randn(6, 24), torch.randn(6, 24))
    hold(compiled, model, *inputs)
    assert calls(compiled, *inputs) == ["openmp_linear"] * 3
    assert_regions(compiled, ("linear", "openmp", 3, 6))


def test_what_would_have_to_wait_long_is_computed_when_it_is_read() -> None:
    """As the layers of a decoder that all read what its encoder gave."""

    def function(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        for query, key, value in ((m.a, m.b, m.c), (m.d, m.e, m.f)):
            weights = torch.softmax(query(x) @ key(memory).mT, -1)
            x = x + m.back(weights @ value(memory))
        return x

    model = Of(function, **layers(*"abcdef"), back=nn.Linear(40, 24))
    compiled, inputs = compiled_of(model), (torch.randn(6, 24), torch.randn(9, 24))
    hold(compiled, model, *inputs)
    alone, together = ["openmp_linear"] * 4, ["openmp_linears"] * 2
    assert calls(compiled, *inputs) == [*alone, *together]


def test_a_weight_used_twice_and_weights_of_both_orders() -> None:
    def function(m: Any, x: Tensor) -> list[Tensor]:
        return [m.a(x), functional.relu(m.a(x)), x @ m.w, functional.linear(x, m.a.weight)]

    model = Of(function, **layers("a"), w=nn.Parameter(torch.randn(24, 7)))
    compiled, x = compiled_of(model), torch.randn(6, 24)
    hold(compiled, model, x)
    assert "shared_input" in details(compiled, "linear")[0]


def test_sizes_that_change() -> None:
    model = Of(gate_first, **layers("gate", "up"), down=nn.Linear(40, 24))
    compiled = compiled_of(model, dynamic=True)
    for rows in (5, 2, 300, 1):
        hold(compiled, model, torch.randn(rows, 24))


def test_changed_weights_show() -> None:
    model = Of(lambda m, x: [m.q(x), m.k(x), m.v(x)], **layers("q", "k", "v"))
    compiled, x = compiled_of(model), torch.randn(6, 24)
    hold(compiled, model, x)
    for name in "qkv":
        with torch.no_grad():
            getattr(model, name).weight.mul_(1.5)
            getattr(model, name).bias.data.add_(1)
        hold(compiled, model, x)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_linears"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """One call, be it computed in half precision or in float32, where the input is widened."""
    model = Of(lambda m, x: [m.q(x), m.k(x), m.v(x)], **layers("q", "k", "v")).to(dtype)
    compiled, x = compiled_of(model), torch.randn(6, 24, dtype=dtype)
    hold(compiled, model, x)
    name = "openmp_linears_half" if library.multiplies(dtype) else "openmp_linears"
    assert calls(compiled, x) == [name]
    assert_regions(compiled, ("linear", "openmp", 3, 6))


def test_under_autocast() -> None:
    model = Of(gate_first, **layers("gate", "up"), down=nn.Linear(40, 24))
    compiled, x = compiled_of(model), torch.randn(6, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), atol=0.03, rtol=0.03)
        assert compiled(x).dtype is torch.bfloat16


def test_in_training_nothing_is_joined() -> None:
    model = Of(gate_first, **layers("gate", "up"), down=nn.Linear(40, 24)).train()
    compiled, x = compiled_of(model), torch.randn(6, 24)
    compiled(x).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_in_inductors_cpp_wrapper() -> None:
    """It takes a list of one result for the tensor itself, and the process dies (torch 2.13)."""

    def function(m: Any, x: Tensor) -> list[Tensor]:
        gated = m.down(functional.silu(m.gate(x)) * m.up(x))
        return [m.q(gated), m.k(gated)]

    model = Of(function, **layers("gate", "up", "q", "k"), down=nn.Linear(40, 24))
    compiled, x = (
        compiled_of(model, options={"inductor": {"cpp_wrapper": True}}),
        torch.randn(6, 24),
    )
    hold(compiled, model, x)
    assert calls(compiled, x) == ["openmp_gated_linear", "openmp_linear", "openmp_linears"]
    assert_regions(compiled, ("linear", "openmp", 5, 10))
