"""What Apple GPUs would get: plans for a Mac that is not here, and the lowered graphs' numbers.

Lowered graphs run on the CPU twice: operators of ours compute their meaning, and then the shaders
themselves, compiled as C++ (tests/support/metal_shim).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from kernel_dispatch import devices, dry_run
from kernel_dispatch.numerics import all_in_double, to_reference
from lowering import observing, providers, targets, toolchain
from lowering.contract import Probe
from lowering.errors import UnifiedWarning
from lowering.metal import registration, shaders
from lowering.providers import inductor, metal
from lowering.targets import mps
from tests.models import zoo
from tests.support import metal_shim
from tests.support.gpu_plans import lowered
from tests.support.metal_shim.translate import signatures
from tests.support.numerics import assert_contract
from tests.support.reports import graph_reports

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
Regions = dict[tuple[str, str], int]


class Heard:
    """What a graph's report would be told while it runs."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.ran: dict[tuple[str, str], int] = {}
        self.demoted: list[str] = []

    def region_ran(self, region: str, provider: str, times: int = 1) -> None:
        self.ran[region, provider] = self.ran.get((region, provider), 0) + times

    def region_demoted(self, region: str, provider: str, reason: Any) -> None:
        self.demoted.append(str(reason))


@contextlib.contextmanager
def on_shaders(pytestconfig: pytest.Config) -> Iterator[None]:
    """Operators of ours launch their shaders, here."""
    found = toolchain.probe()
    if not found.available:
        pytest.skip(found.reason)
    metal_shim.keep_in(pytestconfig.cache.mkdir("metal"))
    registration.forget()
    with shaders.compiled_by(metal_shim.compile_shader):
        yield
    registration.forget()


@pytest.fixture(params=["meaning", "shaders"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Call something; with shaders, hold that all regions of ours really ran, once each."""
    shades = on_shaders(request.config) if request.param == "shaders" else contextlib.nullcontext()

    def call(compiled: Any, planned: Regions, *args: Any, **kwargs: Any) -> Any:
        heard = Heard(1e-2)
        result = observing.listened(heard, functools.partial(compiled, **kwargs), args)
        ours = {key: n for key, n in planned.items() if key[1] == "metal"}
        assert heard.ran == (ours if request.param == "shaders" else {})
        assert not heard.demoted
        return result

    with shades:
        yield call


def holds(
    run: Any, fn: Any, *inputs: Any, device: str = "mps", level: str = "O2", ours: Regions
) -> None:
    """These regions are ours, and the lowered graph computes what eager does, near enough."""
    compiled, backend = lowered(fn, device, level=level)
    with torch.no_grad():
        compiled(*inputs)  # plans
        planned = backend.regions()
        found = {key: count for key, count in planned.items() if key[1] == "metal"}
        assert found == ours
        got, own = run(compiled, planned, *inputs), fn(*inputs)
        reference = fn.double() if isinstance(fn, nn.Module) else fn
        with all_in_double():
            truth = reference(*to_reference(list(inputs)))
    assert_contract(got, own, truth, "mps")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- models ---------------------------------------------------------------------------------------

LLAMA = {
    "O0": {},
    "O1": {("rope", "metal"): 2, ("norm", "metal"): 5},
    "O2": {
        ("attention", "inductor"): 2,
        ("linear", "inductor"): 15,
        ("embedding", "inductor"): 1,
        ("rope", "metal"): 2,
        ("norm", "metal"): 5,
        ("gated", "inductor"): 2,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LLAMA)
def test_a_model_is_planned_and_still_computes_itself(
    level: str, dtype: torch.dtype, run: Any
) -> None:
    entry = zoo.BY_NAME["decoder"]
    model, tokens = entry.model().to(dtype), entry.batch(0)["input_ids"]
    compiled, backend = lowered(lambda tokens: model(tokens).logits, "mps", level=level)
    with torch.no_grad():
        compiled(tokens)
        assert backend.regions() == LLAMA[level]
        (graph,) = backend.graphs
        assert graph.plan.provider == ("inductor" if level == "O2" else "eager")
        got, own = run(compiled, backend.regions(), tokens), model(tokens).logits
        with all_in_double():
            truth = model.double()(tokens).logits
    assert_contract(got, own, truth, f"llama at {level}")


def test_norms_of_heads_are_norms(run: Any) -> None:
    config = Qwen3Config(
        vocab_size=zoo.VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=zoo.SPREAD,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    tokens = torch.randint(0, zoo.VOCABULARY, (2, 8))
    ours = {("rope", "metal"): 2, ("norm", "metal"): 9}
    compiled, backend = lowered(lambda tokens: model(tokens).logits, "mps")
    with torch.no_grad():
        compiled(tokens)
        found = {key: count for key, count in backend.regions().items() if key[1] == "metal"}
        assert found == ours
        got, own = run(compiled, backend.regions(), tokens), model(tokens).logits
        with all_in_double():
            truth = model.double()(tokens).logits
    assert_contract(got, own, truth, "qwen3")


def test_a_step_of_decoding(run: Any) -> None:
    """One new token, keys and values of twelve others in the cache."""
    entry = zoo.BY_NAME["decoder"]
    model, tokens = entry.model(), zoo.BY_NAME["decoder"].batch(1)["input_ids"]

    def step(model: nn.Module, token: Tensor) -> Tensor:
        cache = DynamicCache()
        for layer in range(2):
            kv = model.config.num_key_value_heads
            size = model.config.hidden_size // model.config.num_attention_heads
            dtype = model.lm_head.weight.dtype
            cache.update(
                *(drawn(2, kv, 12, size, dtype=dtype, seed=layer + s) for s in (1, 5)), layer
            )
        return model(token, past_key_values=cache, use_cache=True).logits

    compiled, backend = lowered(functools.partial(step, model), "mps")
    with torch.no_grad():
        compiled(tokens[:, :1])
        found = {key: count for key, count in backend.regions().items() if key[1] == "metal"}
        assert found == {("attention", "metal"): 2, ("rope", "metal"): 2, ("norm", "metal"): 5}
        got = run(compiled, backend.regions(), tokens[:, :1])
        own = step(model, tokens[:, :1])
        with all_in_double():
            truth = step(model.double(), tokens[:, :1])
    assert_contract(got, own, truth, "decoding")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_stays_with_torch(level: str) -> None:
    entry = zoo.BY_NAME["decoder"]
    told = dry_run(entry.model(), (), entry.batch(0), device="mps", options={"level": level})
    assert not {provider for _, provider in told.regions()} & {"metal"}
    (graph,) = told.graphs
    assert graph.facts.training
    assert graph.plan.provider == ("inductor" if level == "O2" else "eager")
    codes = [r.code for no in graph.plan.rejected if no.provider == "metal" for r in no.reasons]
    assert "training-unsupported" in codes


# --- the whole way, where tensors of the CPU are taken for a GPU's ------------------------------------


@pytest.fixture
def taken_for_a_mac(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The target takes tensors of the CPU, everything of it is there, and shaders run."""
    found = Probe.yes("macOS 15.1", **mps.TARGET.on_paper["macos15"])
    mac = replace(mps.TARGET, device_types=("cpu",), probe=lambda: found)
    monkeypatch.setattr(targets, "known", lambda: (mac,))
    monkeypatch.setattr(metal, "PROVIDER", replace(metal.PROVIDER, probe=lambda: found))
    monkeypatch.setitem(providers.known(), "metal", metal.PROVIDER)
    devices.forget()
    with on_shaders(pytestconfig):
        yield
    devices.forget()


@pytest.mark.usefixtures("taken_for_a_mac")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_runs_and_reports_its_kernels(level: str) -> None:
    entry = zoo.BY_NAME["decoder"]
    model, tokens = entry.model(), entry.batch(0)["input_ids"]
    compiled = torch.compile(model, backend="unified", options={"level": level})
    with torch.no_grad():
        for _ in range(3):
            got = compiled(input_ids=tokens).logits
        own = model(input_ids=tokens).logits
        with all_in_double():
            truth = model.double()(input_ids=tokens).logits
    assert_contract(got, own, truth, f"llama at {level}")
    (graph,) = graph_reports(compiled)
    assert (graph.target, graph.provider) == ("mps", "inductor" if level == "O2" else "eager")
    assert not graph.fallbacks
    counted = {
        (row["region"], row["provider"]): (row["count"], row["runs"])
        for row in graph.as_dict()["regions"]
        if row["provider"] == "metal"
    }
    assert counted == {("rope", "metal"): (2, 6), ("norm", "metal"): (5, 15)}


@pytest.mark.usefixtures("taken_for_a_mac")
def test_a_kernel_that_is_wrong_is_told_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(text: str) -> Any:
        return metal_shim.compile_shader(text.replace("+ eps", "+ eps + 1.0f"))

    block, inputs = Block(Rms()), (drawn(2, 5, 48), drawn(2, 5, 48, seed=1))
    compiled = torch.compile(block, backend="unified", options={"level": "O1"})
    with torch.no_grad(), shaders.compiled_by(wrong), pytest.warns(UnifiedWarning, match="off by"):
        got = compiled(*inputs)
    with torch.no_grad():
        assert_contract(got, block(*inputs), block.double()(*to_reference(inputs)), "block")
    (graph,) = graph_reports(compiled)
    (fallback,) = graph.fallbacks
    assert (fallback.provider, fallback.reason.code) == ("metal", "refused-at-run")


# --- norms ----------------------------------------------------------------------------------------


class Rms(nn.Module):
    """As Hugging Face spells it."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


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


class Block(nn.Module):
    """What a transformer does between two layers: the sum lives on, behind the norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = residual + self.linear(x)
        return self.linear(self.norm(summed)), summed + 1


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
def test_every_spelling_of_a_norm(norm: Any, dtype: torch.dtype, level: str, run: Any) -> None:
    block = Block(norm()).to(dtype)
    inputs = drawn(2, 5, 48, dtype=dtype), drawn(2, 5, 48, dtype=dtype, seed=1)
    holds(run, block, *inputs, level=level, ours={("norm", "metal"): 1})


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


def test_a_sum_that_is_wanted_before_its_norm_is_left_alone(run: Any) -> None:
    def early(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        root = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-6)
        late_weight = weight * summed.sum(0)[0].sin()
        return summed * root * late_weight, summed @ weight.outer(weight)

    inputs = (drawn(3, 4, 48), drawn(3, 4, 48, seed=1), drawn(48, seed=2))
    holds(run, early, *inputs, ours={("norm", "metal"): 1})


def test_a_norm_whose_steps_others_want_too(run: Any) -> None:
    def shared(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x + residual).float()
        early = wide.abs().amax(-1, keepdim=True)
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * root).to(x.dtype) * weight, early

    inputs = (drawn(3, 48), drawn(3, 48, seed=1), drawn(48, seed=2))
    inputs = tuple(one.half() for one in inputs)
    holds(run, shared, *inputs, ours={("norm", "metal"): 1})


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


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turned", [neighbours, parts, halves])
def test_every_spelling_of_a_rotation(
    turned: Any, dtype: torch.dtype, level: str, run: Any
) -> None:
    def rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = functional.linear(x, weight).unflatten(-1, (6, 16)).transpose(1, 2)
        query, key = both[:, :4], both[:, 4:]
        return query * cos + turned(query) * sin, key * cos + turned(key) * sin

    angles = drawn(1, 1, 5, 16, seed=3) * 3
    inputs = (drawn(2, 5, 8, dtype=dtype), drawn(96, 8, dtype=dtype, seed=1))
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    holds(run, rope, *inputs, *tables, level=level, ours={("rope", "metal"): 1})


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


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", STEPS)
def test_every_spelling_of_a_step_of_decoding(
    name: str, dtype: torch.dtype, level: str, run: Any
) -> None:
    weight = drawn(32, 32, dtype=dtype, seed=9)

    def attend(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return STEPS[name](query, key, value) @ weight

    inputs = (*_cache(dtype=dtype), weight)
    holds(run, attend, *inputs, level=level, ours={("attention", "metal"): 1})


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


def test_sizes_that_vary(run: Any) -> None:
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
            got = run(compiled, ours, x, *cache, cos)
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


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_metal_lacks_is_refused_with_a_reason(dtype: torch.dtype) -> None:
    with torch.no_grad():
        told = dry_run(lambda x: (x.to(dtype) * 2).sin() + 1, (drawn(8, 8),), device="mps")
    (graph,) = told.graphs
    assert graph.plan.provider == "eager"
    name = str(dtype).removeprefix("torch.")
    said = [
        (no.provider, reason.code, name in reason.text)
        for no in graph.plan.rejected
        if no.target == "mps" and no.region == "graph" and no.provider
        for reason in no.reasons
    ]
    assert ("inductor", "dtype-unsupported", True) in said
    assert ("eager", "dtype-unsupported", True) in said


WRONG_BEFORE = {
    "layer_norm": (lambda x: functional.layer_norm(x, (48,)) + 1, "pytorch#191976"),
    "sum": (lambda x: (x[:, None] - x[None]).sum() + 1, "pytorch#170360"),
}


@pytest.mark.parametrize("name", WRONG_BEFORE)
def test_what_inductor_gets_wrong_in_an_older_torch_runs_eagerly(name: str) -> None:
    fn, issue = WRONG_BEFORE[name]
    with torch.no_grad():
        new, old = (dry_run(fn, (drawn(4, 48),), device=d) for d in ("mps", "mps:torch2.8"))
    assert new.graphs[0].plan.provider == "inductor"
    assert old.graphs[0].plan.provider == "eager"
    reasons = [str(r) for no in old.graphs[0].plan.rejected for r in no.reasons]
    assert any(issue in text and name in text for text in reasons), reasons
    with torch.no_grad():
        other = dry_run(lambda x: x.sin() + 1, (drawn(4, 48),), device="mps:torch2.8")
    assert other.graphs[0].plan.provider == "inductor"


def test_shaders_of_ours_need_macos_14() -> None:
    entry = zoo.BY_NAME["decoder"]
    with torch.no_grad():
        told = dry_run(entry.model(), (), entry.batch(0), device="mps:macos13")
    assert not {provider for _, provider in told.regions()} & {"metal"}
    missing = [
        reason.text
        for no in told.graphs[0].plan.rejected
        if no.provider == "metal"
        for reason in no.reasons
    ]
    assert "needs macos14+" in missing


@pytest.mark.parametrize(
    ("macos", "machine", "version", "wanted", "lacks"),
    [
        (15, "arm64", (2, 13), {"macos14+", "macos15+", "apple7+", "torch2.13+"}, {"macos26+"}),
        (14, "arm64", (2, 12), {"macos14+", "torch2.11+"}, {"macos15+", "torch2.13+"}),
        (26, "arm64", (2, 9), {"macos26+", "apple7+"}, {"torch2.11+"}),
        (13, "x86_64", (2, 8), {"macos13+"}, {"macos14+", "apple7+"}),
    ],
)
def test_what_a_mac_has(
    macos: int, machine: str, version: tuple[int, int], wanted: set[str], lacks: set[str]
) -> None:
    found = mps.features_of(macos, machine, version)
    assert wanted <= found
    assert not lacks & found


# --- probes ---------------------------------------------------------------------------------------


def test_inductor_needs_no_compiler_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "probe", lambda: Probe.no("no working C++ compiler"))
    assert not inductor.probe().available
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert inductor.probe().available


def test_the_provider_is_there_if_a_shader_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no Metal device" in metal.probe().reason
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", metal_shim.compile_shader)
    assert metal.probe().available

    def refuse(text: str) -> Any:
        raise SyntaxError("program_source:1:1: error")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    assert "program_source:1:1" in metal.probe().reason


def test_every_row_says_why() -> None:
    assert all(row.why for row in mps.TARGET.rows)
    assert all(bug.issue.startswith("pytorch#") for bug in mps.KNOWN_BUGS)
