"""The provider `ipex` with the real IPEX, under the one torch that it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from lowering import machine
from lowering.providers import ipex
from tests.conftest import Python
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import in_double
from tests.support.numerics import assert_contract
from tests.support.regions import assert_regions, details, hold, no_cached_graphs, region_rows
from tests.support.reports import fallbacks_of, providers_of

# Whoever else takes linear layers, convolutions and attention: without them it is IPEX's turn.
OTHERS = ["mkldnn", "openmp", "mha", "mkl", "nnpack"]
ONLY_IPEX = {"options": {"disable": OTHERS}}
ACTIVATIONS = [
    *(nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid()),
    *(nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.ELU(0.7)),
]
DTYPES = [torch.float32, torch.bfloat16]
levels = pytest.mark.parametrize("level", ["O1", "O2"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in machine.cpu().isa, reason="the CPU does not multiply bfloat16 itself"
)


@pytest.fixture(autouse=True)
def every_row() -> Iterator[None]:
    """Small layers too, and graphs that were lowered now: those out of caches tell no details."""
    with every_row_applies(), no_cached_graphs():
        yield


def test_the_probe_says_yes_and_that_it_is_archived() -> None:
    found = ipex.probe()
    assert found.available, found.reason
    assert found.version.startswith("2.8")
    assert "archived" in found.details["notes"][0]
    assert ipex.cannot_load() == ""


# --- numbers and report ---------------------------------------------------------------------------


@levels
@dtypes
def test_linear_layers_with_what_follows(level: str, dtype: torch.dtype) -> None:
    layers: list[nn.Module] = [nn.Linear(64, 64, bias=i % 2 == 0) for i in range(11)]
    model = nn.Sequential(*_with_activations(layers)).to(dtype).eval()
    compiled = compile_at(level, model, **ONLY_IPEX)
    for _ in range(2):
        hold(compiled, model, torch.randn(3, 7, 64).to(dtype))
    count = len(ACTIVATIONS)
    assert_regions(compiled, ("linear", "ipex", count, 2 * count))
    (detail,) = details(compiled, "linear")
    names = "relu gelu_erf gelu_tanh silu tanh sigmoid hardswish hardsigmoid clamp leaky_relu elu"
    assert set(detail.removeprefix("with ").split(", ")) == set(names.split())


@levels
@dtypes
def test_convolutions_with_their_batch_norm(level: str, dtype: torch.dtype) -> None:
    layers: list[nn.Module] = []
    for groups, bias in ((1, True), (4, False)) * 5 + ((16, True),):
        norm = nn.BatchNorm2d(16)
        for statistic in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            nn.init.uniform_(statistic, 0.5, 1.5)
        conv = nn.Conv2d(16, 16, 3, padding=groups, dilation=groups, groups=groups, bias=bias)
        layers.append(nn.Sequential(conv, norm))
    strided = nn.Conv2d(16, 8, (3, 1), stride=(2, 1))
    model = nn.Sequential(*_with_activations(layers), strided).to(dtype).eval()
    compiled = compile_at(level, model, **ONLY_IPEX)
    hold(compiled, model, torch.randn(2, 16, 20, 20).to(dtype))
    count = len(ACTIVATIONS) + 1
    assert_regions(compiled, ("convolution", "ipex", count, count))


def _with_activations(layers: list[nn.Module]) -> list[nn.Module]:
    return [one for pair in zip(layers, ACTIVATIONS, strict=True) for one in pair]


@levels
def test_other_image_sizes_use_the_packed_weight(level: str) -> None:
    model = nn.Conv2d(8, 16, 3, padding=1).eval()
    compiled = compile_at(level, model, dynamic=True, **ONLY_IPEX)
    for size in (20, 33, 7):
        hold(compiled, model, torch.randn(2, 8, size, size))
    before = ipex.weights.packed
    hold(compiled, model, torch.randn(1, 8, 41, 12))
    assert ipex.weights.packed == before
    assert {row[:2] for row in region_rows(compiled)} == {("convolution", "ipex")}


@needs_bf16
@levels
@pytest.mark.parametrize(
    ("tokens", "keys", "size", "causal", "scale"),
    [
        (128, 128, 64, False, None),
        (200, 200, 64, True, None),
        (1, 300, 64, False, None),
        (17, 33, 40, False, 0.3),
        (33, 17, 128, True, None),
    ],
)
def test_attention_in_bfloat16(
    level: str, tokens: int, keys: int, size: int, causal: bool, scale: float | None
) -> None:
    """By default, with nobody disabled: here IPEX is ahead of everybody else."""
    attention = Attention(is_causal=causal, scale=scale)
    query = torch.randn(2, tokens, 4, size).bfloat16().transpose(1, 2)
    key, value = (torch.randn(2, 4, keys, size).bfloat16() for _ in range(2))
    compiled = compile_at(level, attention)
    hold(compiled, attention, query, key, value)
    assert_regions(compiled, ("attention", "ipex", 1, 1))


@needs_bf16
@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (1, 1, 16, 16), (2, 1, 1, 16)])
@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_masks_and_rows_without_any_key(sizes: tuple[int, ...], kind: str) -> None:
    """Zeros as from torch, where IPEX itself gives NaN."""
    kept = torch.rand(sizes) > 0.3
    kept[..., 0, :] = False  # nothing is left for the first row (of all, where there is one)
    mask = kept if kind == "bool" else torch.zeros(sizes).masked_fill(~kept, -torch.inf).bfloat16()
    attention = Attention()
    query, key, value = (torch.randn(2, 4, 16, 64).bfloat16() for _ in range(3))
    compiled = compile_at("O2", attention)
    got = hold(compiled, attention, query, key, value, mask.expand(2, 4, 16, 16))
    assert not got[:, :, 0].any()
    assert_regions(compiled, ("attention", "ipex", 1, 1))


@needs_bf16
def test_nan_that_comes_in_goes_out() -> None:
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    mask[..., 0, :] = False
    query, key, value = (torch.randn(1, 4, 16, 64).bfloat16() for _ in range(3))
    query[0, 0, 3, 0] = torch.nan
    with torch.no_grad():
        got = compile_at("O2", Attention())(query, key, value, mask)
    assert torch.isnan(got[0, 0, 3]).all()
    assert torch.isnan(got).sum() == 64
    assert not got[:, :, 0].any()


@needs_bf16
def test_heads_that_are_shared_go_elsewhere() -> None:
    """IPEX reads beyond their end."""
    attention = Attention(enable_gqa=True)
    query = torch.randn(2, 4, 16, 64).bfloat16()
    key, value = (torch.randn(2, 2, 16, 64).bfloat16() for _ in range(2))
    compiled = compile_at("O2", attention)
    hold(compiled, attention, query, key, value)
    assert "ipex" not in providers_of(compiled)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        return scaled_dot_product_attention(query, key, value, mask, **self.options)


# --- weights, autocast, training, wishes ----------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).flatten(1))


@levels
@dtypes
def test_an_updated_weight_shows_in_the_next_output(level: str, dtype: torch.dtype) -> None:
    model = Small().to(dtype).eval()
    compiled = compile_at(level, model, **ONLY_IPEX)
    x = torch.randn(8, 3, 8, 8).to(dtype)  # of few rows MKL's packed product, on Intel, is inexact
    first = hold(compiled, model, x)
    updates: list[Callable[[], Any]] = [
        lambda: model.load_state_dict(Small().to(dtype).state_dict()),
        lambda: model.out.bias.mul_(3.0),
        lambda: model.norm.running_var.mul_(4.0),
        lambda: model.conv.weight.add_(0.5),
    ]
    for update in updates:
        with torch.no_grad():
            update()
        after = hold(compiled, model, x)
        assert not torch.equal(first, after)
        first = after
    assert {row[1] for row in region_rows(compiled)} == {"ipex"}


def test_nothing_is_packed_twice() -> None:
    model = Small().eval()
    compiled = compile_at("O1", model, **ONLY_IPEX)
    x = torch.randn(2, 3, 8, 8)
    hold(compiled, model, x)
    packed = ipex.weights.packed
    for _ in range(3):
        hold(compiled, model, x)
    assert ipex.weights.packed == packed


@needs_bf16
@levels
def test_autocast_rounds_the_weight_once(level: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    compiled = compile_at(level, model, **ONLY_IPEX)
    x = torch.randn(5, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, own = compiled(x), model(x)
    assert got.dtype == torch.bfloat16
    assert_contract(got, own, in_double(model, x), "autocast")
    assert_regions(compiled, ("linear", "ipex", 2, 2))


def test_training_goes_to_whoever_takes_it() -> None:
    model = Small()
    compiled = compile_at("O2", model, **ONLY_IPEX)
    x = torch.randn(4, 3, 8, 8)
    compiled(x).square().mean().backward()
    assert "ipex" not in providers_of(compiled)
    assert not fallbacks_of(compiled)
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    own = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-5)


@needs_bf16
def test_disabled_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_DISABLE", "ipex")
    query = torch.randn(1, 4, 32, 64).bfloat16()
    compiled = compile_at("O2", Attention())
    hold(compiled, Attention(), query, query, query)
    assert providers_of(compiled) == ["inductor", "mha"]


def test_empty_batches_are_eager_s() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    compiled = compile_at("O1", model, **ONLY_IPEX)
    with torch.no_grad():
        assert compiled(torch.randn(0, 8)).shape == (0, 8)


# --- in processes of their own --------------------------------------------------------------------


LAZY = """
import sys, torch, kernel_dispatch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).eval()
compiled = torch.compile(model, backend="unified", options={"level": "O1"})
with torch.no_grad():
    out = compiled(torch.randn(64, 1024))
assert "libintel-ext-pt-cpu" not in open("/proc/self/maps").read(), "loaded without need"
assert "intel_extension_for_pytorch" not in sys.modules
query = torch.randn(1, 8, 64, 64).bfloat16()
attention = torch.nn.functional.scaled_dot_product_attention
wanted = attention(query, query, query)
compiled = torch.compile(attention, backend="unified", options={"level": "O1"})
assert torch.allclose(compiled(query, query, query), wanted, atol=0.02)
loaded = "libintel-ext-pt-cpu" in open("/proc/self/maps").read()
print("loaded" if loaded else "not loaded")
assert "intel_extension_for_pytorch" not in sys.modules
import intel_extension_for_pytorch as ipex
tuned = ipex.optimize(model)
with torch.no_grad():
    assert torch.allclose(tuned(torch.ones(2, 1024)), model(torch.ones(2, 1024)), atol=1e-4)
torch._dynamo.reset()
compiled = torch.compile(attention, backend="unified", options={"level": "O2"})
assert torch.allclose(compiled(query, query, query), wanted, atol=0.02)
(graph,) = kernel_dispatch.report(compiled)
print([region.provider for region in graph.regions])
"""


@needs_bf16
def test_loaded_when_a_row_takes_it_and_ipex_itself_works_behind_it(python: Python) -> None:
    done = python(LAZY)
    assert done.stdout.splitlines()[-2:] == ["loaded", "['ipex']"]


CACHED = """
import torch, kernel_dispatch
attention = torch.nn.functional.scaled_dot_product_attention
query = torch.randn(1, 8, 64, 64).bfloat16() * 2
compiled = torch.compile(attention, backend="unified", options={"level": "O2"})
assert torch.allclose(compiled(query, query, query), attention(query, query, query), atol=0.02)
(graph,) = kernel_dispatch.report(compiled)
assert not graph.fallbacks, graph.fallbacks
print(graph.as_dict()["regions"])
"""


@needs_bf16
def test_a_graph_out_of_torch_s_caches_finds_the_operators(python: Python, tmp_path: Any) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(2):
        assert "ipex" in python(CACHED, **cache).stdout
