"""Regions that kernels of ours take on Apple GPUs: every spelling of them; what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_dispatch import dry_run
from kernel_dispatch.numerics import to_reference
from lowering import observing
from lowering.metal import shaders
from tests.support import metal_shim
from tests.support.gpu_plans import lowered
from tests.support.metal_shim.translate import signatures
from tests.support.mps_plans import Block, Heard, Rms, drawn, holds, on_shaders
from tests.support.numerics import assert_contract

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


# --- norms ----------------------------------------------------------------------------------------


class Gemma(nn.Module):
    """The weight is added to one, in float32."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class AsOnMetal(nn.Module):
    """What torch.nn.RMSNorm becomes where tensors are on "mps": an operator with two results."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], self.weight, 1e-6)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "norm",
    [
        Rms,
        Gemma,
        AsOnMetal,
        lambda: nn.RMSNorm(48),
        lambda: nn.RMSNorm(48, elementwise_affine=False),
    ],
)
def test_every_spelling_of_a_norm(norm: Any, dtype: torch.dtype, level: str, on_metal: Any) -> None:
    block = Block(norm()).to(dtype)
    inputs = drawn(2, 5, 48, dtype=dtype), drawn(2, 5, 48, dtype=dtype, seed=1)
    holds(on_metal, block, *inputs, level=level, ours={("norm", "metal"): 1})


def test_the_addition_before_a_norm_is_taken_with_it(pytestconfig: pytest.Config) -> None:
    launches = []

    def recorded(text: str) -> Any:
        library = metal_shim.compile_shader(text)

        def rms_norm(*args: Any, **kwargs: Any) -> None:
            launches.append(args)
            library.rms_norm(*args, **kwargs)

        return SimpleNamespace(rms_norm=rms_norm)

    compiled, _ = lowered(Block(Rms()), "mps")
    with on_shaders(pytestconfig), shaders.compiled_by(recorded), torch.no_grad():
        compiled(drawn(2, 5, 48), drawn(2, 5, 48))
    names = [one.name for one in signatures(shaders.source("rms_norm"))["rms_norm"].given]
    assert [dict(zip(names, args, strict=True))["has_residual"] for args in launches] == [1]


def test_a_sum_that_is_wanted_before_its_norm_is_left_alone(on_metal: Any) -> None:
    def early(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        root = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-6)
        late_weight = weight * summed.sum(0)[0].sin()
        return summed * root * late_weight, summed @ weight.outer(weight)

    inputs = (drawn(3, 4, 48), drawn(3, 4, 48, seed=1), drawn(48, seed=2))
    holds(on_metal, early, *inputs, ours={("norm", "metal"): 1})


def test_a_norm_whose_steps_others_want_too(on_metal: Any) -> None:
    def shared(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x + residual).float()
        early = wide.abs().amax(-1, keepdim=True)
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * root).to(x.dtype) * weight, early

    inputs = (drawn(3, 48), drawn(3, 48, seed=1), drawn(48, seed=2))
    inputs = tuple(one.half() for one in inputs)
    holds(on_metal, shared, *inputs, ours={("norm", "metal"): 1})


def test_norms_that_are_not_ours_are_left_with_a_reason() -> None:
    def others(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        still_wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return functional.layer_norm(x, x.shape[-1:]), still_wide @ still_wide.t()

    with torch.no_grad():
        told = dry_run(others, (drawn(3, 48, dtype=torch.float16),), device="mps")
    assert told.regions() == {("norm", "inductor"): 2}


# --- rotations ------------------------------------------------------------------------------------


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def parts(x: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-second, first), -1).reshape(x.shape)


def halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turned", [neighbours, parts, halves])
def test_every_spelling_of_a_rotation(
    turned: Any, dtype: torch.dtype, level: str, on_metal: Any
) -> None:
    def rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = functional.linear(x, weight).unflatten(-1, (6, 16)).transpose(1, 2)
        query, key = both[:, :4], both[:, 4:]
        return query * cos + turned(query) * sin, key * cos + turned(key) * sin

    angles = drawn(1, 1, 5, 16, seed=3) * 3
    inputs = (drawn(2, 5, 8, dtype=dtype), drawn(96, 8, dtype=dtype, seed=1))
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    holds(on_metal, rope, *inputs, *tables, level=level, ours={("rope", "metal"): 1})


def test_a_rotation_with_other_angles_for_each_head_is_left() -> None:
    def rope(query: Tensor, key: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
        return query * cos + halves(query) * cos, key * cos + halves(key) * cos

    query = drawn(2, 4, 5, 16)
    with torch.no_grad():
        told = dry_run(rope, (query, query + 1, drawn(1, 4, 5, 16)), device="mps")
    assert told.regions() == {("rope", "inductor"): 1}


# --- attention ------------------------------------------------------------------------------------


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **kwargs)


def _cache(keys: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    query = drawn(2, 1, 4, 32, dtype=dtype).transpose(1, 2)
    cache = drawn(2, 2, keys + 3, 32, dtype=dtype, seed=1)
    return query, cache[:, :, :keys], drawn(2, 2, keys, 32, dtype=dtype, seed=2)


STEPS: dict[str, Callable[..., Tensor]] = {
    "grouped heads": lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
    "repeated heads": lambda q, k, v: sdpa(
        q,
        k[:, :, None].expand(2, 2, 2, *k.shape[2:]).reshape(2, 4, *k.shape[2:]),
        v[:, :, None].expand(2, 2, 2, *v.shape[2:]).reshape(2, 4, *v.shape[2:]),
    ),
    "a scale": lambda q, k, v: sdpa(q, k, v, scale=0.3, enable_gqa=True),
    "a mask of bool": lambda q, k, v: sdpa(
        q, k, v, torch.arange(k.shape[2])[None, None, None] < 7, enable_gqa=True
    ),
    "an added mask": lambda q, k, v: sdpa(
        q, k, v, torch.linspace(-1, 1, k.shape[2], dtype=q.dtype)[None], enable_gqa=True
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", STEPS)
def test_every_spelling_of_a_step_of_decoding(
    name: str, dtype: torch.dtype, level: str, on_metal: Any
) -> None:
    weight = drawn(32, 32, dtype=dtype, seed=9)

    def attend(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return STEPS[name](query, key, value) @ weight

    inputs = (*_cache(dtype=dtype), weight)
    holds(on_metal, attend, *inputs, level=level, ours={("attention", "metal"): 1})


OTHERS: dict[str, Callable[..., Tensor]] = {
    "several queries": lambda q, k, v: sdpa(q.repeat(1, 1, 3, 1), k, v, enable_gqa=True),
    "is_causal": lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    "large heads": lambda q, k, v: sdpa(
        *(one.repeat(1, 1, 1, 9) for one in (q, k, v)), enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_is_not_ours(name: str) -> None:
    with torch.no_grad():
        told = dry_run(OTHERS[name], _cache(), device="mps")
    assert told.regions() == {("attention", "inductor"): 1}


def test_sizes_that_vary(on_metal: Any) -> None:
    """The second length makes Dynamo trace a graph for all of them; the cache grows as it likes."""
    norm = Rms(32)

    def step(x: Tensor, key: Tensor, value: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
        query = norm(x)[:, :, :1]
        other = x - 0.5
        both = (x * cos + halves(x) * cos) + (other * cos + halves(other) * cos)
        return sdpa(query, key, value, enable_gqa=True), both

    compiled, backend = lowered(step, "mps")
    ours = {("attention", "metal"): 1, ("norm", "metal"): 1, ("rope", "metal"): 1}
    for length in (5, 9, 12, 40):
        x, cos = drawn(2, 4, length, 32), drawn(2, 1, length, 32, seed=1)
        cache = drawn(2, 2, length + 3, 32, seed=2), drawn(2, 2, length + 3, 32, seed=3)
        with torch.no_grad():
            compiled(x, *cache, cos)
            got = on_metal(compiled, ours, x, *cache, cos)
            own, truth = step(x, *cache, cos), step(*to_reference([x, *cache, cos]))
        assert_contract(got, own, truth, f"length {length}")
    assert [graph.facts.dynamic for graph in backend.graphs] == [False, True]
    for graph in backend.graphs:
        found = {(one.name, one.provider): one.count for one in graph.regions}
        assert {key: n for key, n in found.items() if key[1] == "metal"} == ours


# --- eight bits -----------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, outlier: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(2048, 1024)
        with torch.no_grad():
            self.linear.weight[:, 0] *= outlier

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows_and_an_int8_weight_at_o3(rows: int, pytestconfig: pytest.Config) -> None:
    model = Wide()
    compiled, backend = lowered(model, "mps", level="O3")
    x, heard = drawn(rows, 2048), Heard(1e-2)
    with on_shaders(pytestconfig), torch.no_grad():
        got = observing.listened(heard, compiled, (x,))
        exact = model(x)
        assert heard.ran == {("linear", "metal"): 1}
        assert ("linear", "metal") in backend.regions()
        error = torch.linalg.vector_norm(got - exact) / torch.linalg.vector_norm(exact)
        assert 0 < error < 1e-2
        model.linear.weight.mul_(2)  # an update shows
        again = observing.listened(heard, compiled, (x,))
        assert torch.allclose(again, model(x), atol=0.05)
    assert not heard.demoted


def test_a_layer_that_int8_spoils_stays_as_it_is(pytestconfig: pytest.Config) -> None:
    """One large number in each row of the weight takes the precision of all others."""
    model, heard, x = Wide(outlier=3e3), Heard(1e-2), drawn(1, 2048)
    x[:, 0] = 0
    compiled, _ = lowered(model, "mps", level="O3")
    with on_shaders(pytestconfig), torch.no_grad():
        got = observing.listened(heard, compiled, (x,))
        assert torch.equal(got, model(x))
        assert torch.equal(observing.listened(heard, compiled, (x,)), model(x))
    (told,) = heard.demoted
    assert "over-tolerance" in told


def test_many_rows_stay_with_apple() -> None:
    with torch.no_grad():
        told = dry_run(Wide(), (drawn(17, 2048),), device="mps", options={"level": "O3"})
    assert told.regions() == {("linear", "inductor"): 1}
