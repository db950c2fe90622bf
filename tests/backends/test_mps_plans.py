"""What Apple GPUs would get: plans for a Mac that is not here, and the lowered graphs' numbers.

Lowered graphs run on the CPU twice: operators of ours compute their meaning, and then the shaders
themselves, compiled as C++ (tests/support/metal_shim).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from kernel_dispatch import devices, dry_run
from kernel_dispatch.numerics import all_in_double, to_reference
from lowering import providers, targets, toolchain
from lowering.contract import Probe
from lowering.errors import UnifiedWarning
from lowering.metal import shaders
from lowering.providers import inductor, metal
from lowering.targets import mps
from tests.models import zoo
from tests.support import metal_shim
from tests.support.gpu_plans import lowered
from tests.support.mps_plans import Block, Rms, drawn, on_shaders
from tests.support.numerics import assert_contract
from tests.support.reports import graph_reports

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LLAMA)
def test_a_model_is_planned_and_still_computes_itself(
    level: str, dtype: torch.dtype, on_metal: Any
) -> None:
    entry = zoo.BY_NAME["decoder"]
    model, tokens = entry.model().to(dtype), entry.batch(0)["input_ids"]
    compiled, backend = lowered(lambda tokens: model(tokens).logits, "mps", level=level)
    with torch.no_grad():
        compiled(tokens)
        assert backend.regions() == LLAMA[level]
        (graph,) = backend.graphs
        assert graph.plan.provider == ("inductor" if level == "O2" else "eager")
        got, own = on_metal(compiled, backend.regions(), tokens), model(tokens).logits
        with all_in_double():
            truth = model.double()(tokens).logits
    assert_contract(got, own, truth, f"llama at {level}")


def test_norms_of_heads_are_norms(on_metal: Any) -> None:
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
        got, own = on_metal(compiled, backend.regions(), tokens), model(tokens).logits
        with all_in_double():
            truth = model.double()(tokens).logits
    assert_contract(got, own, truth, "qwen3")


def test_a_step_of_decoding(on_metal: Any) -> None:
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
        got = on_metal(compiled, backend.regions(), tokens[:, :1])
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


# --- the whole way, with the CPU in place of a GPU ------------------------------------------------


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
