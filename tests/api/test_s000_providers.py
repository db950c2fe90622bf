"""The fourteen providers, one by one: what each really does here, or why it does nothing."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kernel_dispatch
from kernel_dispatch import DryRun, ProviderId, devices, dry_run
from kernel_dispatch.registry import (
    BackendInfo,
    BackendRegistry,
    CompileContext,
    Provider,
    policy,
    table,
)
from lowering import machine, providers, targets
from lowering.levels import Level
from lowering.providers import nnpack, xeon
from tests.support.fake_machine import gpu, pretend
from tests.support.gpu_plans import lowered
from tests.support.numerics import assert_contract
from triton_kernels import availability

IDS = {
    "cuda": 0,
    "mps": 1,
    "cudnn": 2,
    "cusparselt": 3,
    "cpu": 10,
    "mkl": 11,
    "mkldnn": 12,
    "openmp": 13,
    "xeon": 14,
    "nki": 20,
    "triton": 21,
    "mha": 22,
    "nnpack": 23,
    "opt_einsum": 24,
}
NO_NVIDIA = "met, not run on hardware: no NVIDIA GPU here"


def provider(name: str) -> Provider:
    found = BackendRegistry.instance().get_backend(name)
    assert isinstance(found, Provider)
    return found


def compiled_by(name: str, model: Any, *inputs: Tensor, **asked: Any) -> CompileContext:
    ctx = CompileContext(model, inputs, **asked)
    assert provider(name).compile(ctx), ctx.error
    assert ctx.report
    assert not ctx.report.fallbacks
    return ctx


def hold(ctx: CompileContext, *inputs: Tensor) -> None:
    """Its numbers keep the contract of O1 and O2."""
    assert ctx.compiled is not None
    with torch.no_grad():
        got, eager = ctx.compiled(*inputs), ctx.model(*inputs)
        model: Any = ctx.model
        wide = model.double() if isinstance(model, nn.Module) else model
        reference = wide(*(one.double() for one in inputs))
        if isinstance(model, nn.Module):
            model.float()
    assert_contract(got, eager, reference, str(ctx.taken))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()


class Images(nn.Module):
    """conv + BatchNorm + ReLU."""

    def __init__(self, kernel: int = 3, channels: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))


class Block(nn.Module):
    """A transformer block with heads of 64."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).unbind(-3)
        query, key, value = (part.transpose(1, 2) for part in heads)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def planned(model: Any, *inputs: Tensor, device: str = "cuda:sm90", **options: Any) -> DryRun:
    """What a device that is not here would get."""
    with torch.no_grad():
        return dry_run(model, inputs, device=device, options=options)


def lowered_and_run(model: Any, *inputs: Tensor, **options: Any) -> dict[tuple[str, str], int]:
    """The regions of the graph for a GPU. It runs here, where kernels compute their plain meaning:
    the numbers are eager's."""
    with torch.no_grad():
        compiled, plans = lowered(model, "cuda:sm90", **options)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), atol=2e-3, rtol=2e-3)
    assert {graph.plan.target for graph in plans.graphs} == {"cuda"}
    return plans.regions()


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_s000_01_fourteen_providers_with_their_numbers() -> None:
    """Fourteen providers have the numbers, names and needs that the design gives them, and each is
    registered."""
    assert {info.name: int(info.type) for info in table.TABLE} == IDS
    assert {i.name.lower(): int(i) for i in ProviderId if i is not ProviderId.UNKNOWN} == IDS
    assert ProviderId.UNKNOWN == 999
    assert ProviderId["BT_OPT_EINSUM"] is ProviderId.OPT_EINSUM
    assert {info.name for info in table.TABLE if info.requires_gpu} == {
        *("cuda", "mps", "cudnn", "triton", "cusparselt")
    }
    assert all(isinstance(info, BackendInfo) and info.display_name for info in table.TABLE)
    for name, number in IDS.items():
        assert provider(name).get_type() == number
    with pytest.raises(AttributeError):
        table.TABLE[0].name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", IDS)
def test_s000_01_no_number_is_a_name_only(name: str) -> None:
    """Each stands on targets and providers that exist, with a probe and rows of the table."""
    info = table.BY_NAME[name]
    records = [targets.find(one) for one in info.targets]
    assert records
    assert all(records)
    rows = [row for record in records if record for row in record.rows]
    for one in info.providers:
        probe = providers.get(one).probe()
        assert probe.available or probe.reason
        if name != "xeon":  # which tells facts, and computes nothing itself
            assert {r.target for r in rows if r.provider == one} == set(
                info.targets
            ) or one == "ipex"
    assert rows
    found = provider(name)
    assert found.is_available() == (not found.reason)


# --- whole targets --------------------------------------------------------------------------------


@pytest.mark.status(NO_NVIDIA)
def test_s000_02_cuda() -> None:
    """NVIDIA GPUs: a transformer block gets at least three kinds of hot regions from the table."""
    found = lowered_and_run(Block().half().eval(), torch.randn(2, 256, 128).half(), provider="cuda")
    assert {("linear", "inductor"), ("attention", "cudnn"), ("norm", "inductor")} <= set(found)
    if not provider("cuda").is_available():
        assert "this torch is" in provider("cuda").reason or "GPU" in provider("cuda").reason


def test_s000_03_cpu() -> None:
    """The CPU: at O0 bit-equal to eager, above it close to eager, with all that it has."""
    model, x = mlp(), torch.randn(64, 256)
    exact = compiled_by("cpu", model, x, level="O0")
    assert exact.compiled is not None
    with torch.no_grad():
        assert torch.equal(exact.compiled(x), model(x))
    assert exact.taken == ()
    close = compiled_by("cpu", model, x, level="O1")
    hold(close, x)
    assert close.report is not None
    assert {graph.target for graph in close.report} == {"cpu"}


@pytest.mark.status("met, not run on hardware: no Mac here")
def test_s000_04_mps() -> None:
    """Apple GPUs: graphs go to Inductor's Metal code and our kernels, and float64 is refused."""
    told = planned(mlp(), torch.randn(64, 256), device="mps", provider="mps")
    (graph,) = told.graphs
    assert (graph.plan.target, graph.plan.provider) == ("mps", "inductor")
    wide = planned(mlp().double(), torch.randn(64, 256).double(), device="mps")
    reasons = [reason.code for no in wide.graphs[0].plan.rejected for reason in no.reasons]
    assert "dtype-unsupported" in reasons
    assert not provider("mps").supports_data_type(torch.float64)
    assert provider("mps").supports_data_type(torch.float16)
    if not provider("mps").is_available():
        assert "macOS" in provider("mps").reason


@pytest.mark.status("met, not run on hardware: no Neuron device here")
def test_s000_09_nki(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS Neuron: absent with the reason; where it is, inference goes to its compiler and training
    does not."""
    if not provider("nki").is_available():
        assert "torch_neuronx" in provider("nki").reason
    told = planned(mlp(), torch.randn(4, 256), device="neuron:inf2", provider="nki")
    assert [graph.plan.provider for graph in told.graphs] == ["nki"]
    training = dry_run(mlp(), (torch.randn(4, 256),), device="neuron:inf2")
    codes = {r.code for no in training.graphs[0].plan.rejected for r in no.reasons}
    assert "training-unsupported" in codes
    pretend(monkeypatch, {"neuron": {"device": "neuron", "features": ["native"]}}, ["nki"])
    assert provider("nki").is_available()
    assert not provider("nki").supports_data_type(torch.float64)


@pytest.mark.quick
def test_s000_15_xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Xeon is told by its name, with its AVX-512 and AMX; any other CPU is refused by name, and
    the launcher that places its threads is said."""
    facts = machine.cpu()
    isa = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8"})
    others = {**vars(facts), "isa": isa, "vendor": "intel"}
    xeon_cpu = machine.CpuFacts(**{**others, "model": "Intel(R) Xeon(R) Platinum 8488C"})
    monkeypatch.setattr(machine, "cpu", lambda: xeon_cpu)
    monkeypatch.setattr(devices, "_answers", {})  # what was asked of the real CPU, and of this one
    found = provider("xeon")
    assert found.is_available()
    assert "with AMX" in found.probe.version
    info = kernel_dispatch.get_backend_info("xeon")
    assert {"avx512f", "amx_bf16"} <= set(info["isa"])
    core = machine.CpuFacts(**{**others, "model": "Intel(R) Core(TM) i9"})
    monkeypatch.setattr(machine, "cpu", lambda: core)
    assert not found.is_available()
    assert "Core(TM) i9" in found.reason
    assert "kernel_dispatch launch" in found.reason
    assert xeon.PROVIDER.compile is None


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.status(NO_NVIDIA)
def test_s000_05_cudnn() -> None:
    """cuDNN: attention in half precision becomes its own, and convolutions stay its calls."""
    query = torch.randn(2, 4, 128, 64).half()

    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    assert lowered_and_run(attend, query, provider="cudnn") == {("attention", "cudnn"): 1}
    image = torch.randn(1, 32, 16, 16)
    images = lowered_and_run(Images().eval(), image, provider="cudnn", level="O1")
    assert images == {("convolution", "cudnn"): 1}
    assert lowered_and_run(attend, query.float(), provider="cudnn") == {}
    if not provider("cudnn").is_available():
        assert provider("cudnn").reason


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_s000_06_mkl() -> None:
    """MKL: its probe is torch's own word; linear layers in float32 inference are its packed
    products, close to eager and named in the report."""
    assert provider("mkl").is_available() == torch.backends.mkl.is_available()
    model, x = mlp(), torch.randn(64, 256)
    ctx = compiled_by("mkl", model, x, level="O1")
    assert ctx.taken == ("linear:mkl",)
    hold(ctx, x)
    assert ctx.report is not None
    (graph,) = ctx.report
    (row,) = [row for row in graph.as_dict()["regions"] if row["provider"] == "mkl"]
    assert (row["count"], row["runs"]) == (2, 4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_s000_07_mkldnn() -> None:
    """oneDNN: linear and what follows, and convolution with BatchNorm and ReLU, are one call each;
    IPEX stands beside it where that is installed."""
    images, x = Images().eval(), torch.randn(1, 32, 32, 32)
    ctx = compiled_by("mkldnn", images, x, level="O1")
    assert ctx.taken == ("convolution:mkldnn",)
    hold(ctx, x)
    assert ctx.report is not None
    (row,) = [row for row in ctx.report[0].as_dict()["regions"] if row["region"] == "convolution"]
    assert "relu" in row["detail"]
    assert "fold-batch-norm" in row["recipes"]
    assert table.BY_NAME["mkldnn"].providers == ("mkldnn", "ipex")
    assert not providers.get("ipex").probe().available or provider("mkldnn").is_available()


@pytest.fixture(scope="module")
def by_openmp() -> CompileContext:
    """The one graph of this file for which C++ is generated."""
    if not provider("openmp").is_available():
        pytest.skip(provider("openmp").reason)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Softmax(-1))
    return compiled_by("openmp", model.eval(), torch.randn(64, 256), num_workers=2)


def test_s000_08_openmp(by_openmp: CompileContext) -> None:
    """OpenMP: linear layers and a softmax are C++ kernels of this project, compiled with OpenMP, on
    as many threads as `num_workers` says."""
    assert by_openmp.taken == ("linear:openmp", "softmax:openmp")
    hold(by_openmp, torch.randn(64, 256))
    flags = provider("openmp").get_compile_flags()
    assert "openmp" in flags.split("provider=openmp")[1]  # -fopenmp, or -Xpreprocessor -fopenmp
    assert by_openmp.report is not None
    (graph,) = by_openmp.report
    assert graph.settings.threads == 2
    assert graph.provider == "inductor"


def test_s000_08_s001_11_threads_during_the_call() -> None:
    """`num_workers=n` is the number of CPU threads while the graph runs, and the caller's number is
    back after it."""
    before, seen = torch.get_num_threads(), []

    def count(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x.clone()

    operator = torch.library.custom_op(
        "provider_tests::count", count, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(torch.empty_like)
    other = before + 1
    ctx = compiled_by(
        "cpu", lambda x: operator(x) + 1, torch.ones(4), level="O0", num_workers=other
    )
    assert ctx.compiled is not None
    ctx.compiled(torch.ones(4))
    assert set(seen) == {other}
    assert torch.get_num_threads() == before
    wrong = CompileContext(mlp(), (torch.ones(1, 256),), num_workers=0)
    with pytest.raises(kernel_dispatch.SettingError, match="threads=0"):
        provider("cpu").compile(wrong)


@pytest.mark.status(NO_NVIDIA)
def test_s000_10_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton: kernels of this project where they win, and at O3 products by Triton's code alone;
    without a GPU that it knows, absent with the reason."""
    cache = torch.randn(1, 8, 512, 64).half()

    def step(query: Tensor, cache: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, cache, cache)

    query = torch.randn(1, 8, 1, 64).half()
    assert lowered_and_run(step, query, cache, provider="triton") == {("attention", "triton"): 1}
    wanted = {"max_autotune_gemm_backends": "TRITON"}
    assert policy.inductor_config("triton", "cuda", Level.O3) == wanted
    assert policy.inductor_config("triton", "cuda", Level.O2) == {}
    assert policy.inductor_config("triton", "cpu", Level.O3) == {}
    pretend(monkeypatch, {"cuda": gpu("sm90")})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert provider("triton").reason == availability.status().reason, "a GPU alone is not enough"


@pytest.mark.status(NO_NVIDIA)
def test_s000_11_cusparselt() -> None:
    """cuSPARSELt: a weight with two zeros among every four numbers goes to its sparse product; any
    other is refused."""
    sparse = nn.Linear(1024, 1024, bias=False).half().eval()
    mask = torch.tensor([True, True, False, False]).repeat(256)
    x = torch.randn(512, 1024).half()
    assert planned(sparse, x, provider="cusparselt").regions() == {("linear", "inductor"): 1}
    with torch.no_grad():
        sparse.weight.mul_(mask)
    assert planned(sparse, x, provider="cusparselt").regions() == {("linear", "cusparselt"): 1}
    if not provider("cusparselt").is_available():
        assert provider("cusparselt").reason


def test_s000_12_mha() -> None:
    """Attention that `nn.MultiheadAttention` spells out becomes one fused attention."""
    attention = nn.MultiheadAttention(64, 2, batch_first=True).eval()

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 16, 64)
    found = provider("mha")
    if not found.is_available():
        pytest.skip(found.reason)
    ctx = compiled_by("mha", attend, x, options={"disable": ["inductor"]})
    assert ctx.taken == ("attention:mha",)
    assert ctx.compiled is not None
    with torch.no_grad():
        torch.testing.assert_close(ctx.compiled(x), attend(x))


@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="this torch has no NNPACK")
def test_s000_13_nnpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """NNPACK: convolutions with wide kernels of one image, on one thread, are its transforms and
    close to eager; others are refused with the reason."""
    assert provider("nnpack").is_available() == nnpack.probe().available
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # its pool keeps what it began with
    monkeypatch.setattr(nnpack, "_pool", (os.getpid(), 1))
    x = torch.randn(1, 32, 48, 48)
    conv = nn.Conv2d(32, 48, 5, padding=2).eval()
    ctx = compiled_by("nnpack", conv, x, level="O1")
    assert ctx.taken == ("convolution:nnpack",)
    hold(ctx, x)
    refused = compiled_by("nnpack", nn.Conv2d(32, 32, 3).eval(), x, level="O1")
    assert refused.taken == ()
    assert any("nnpack" in note for note in refused.notes)
    nnpack.weights.clear()


def test_s000_14_opt_einsum() -> None:
    """opt_einsum: an einsum of three operands is multiplied in the order with the fewest FLOPs."""
    found = provider("opt_einsum")
    if not found.is_available():
        assert "not installed" in found.reason
        pytest.skip(found.reason)
    a, b, c = torch.randn(96, 8), torch.randn(8, 128), torch.randn(128, 4)

    def chain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("ij,jk,kl->il", a, b, c)

    ctx = compiled_by("opt_einsum", chain, a, b, c, level="O1")
    assert ctx.taken == ("einsum:opt_einsum",)
    assert ctx.report is not None
    (region,) = ctx.report[0].regions
    left_to_right = 2 * math.prod((96, 8, 128)) + 2 * math.prod((96, 128, 4))
    best = 2 * math.prod((8, 128, 4)) + 2 * math.prod((96, 8, 4))
    assert f"{best}" in region.detail.replace(",", "") or f"{left_to_right}" not in region.detail
    hold(ctx, a, b, c)
