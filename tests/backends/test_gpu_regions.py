"""Regions that GPUs get kernels for: who takes them, who does not and why, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_dispatch import dry_run
from kernel_dispatch.numerics import double_by_default, to_reference
from lowering import packing, reduced_linear
from lowering.providers import cudnn, cusparselt
from tests.support.gpu_plans import lowered
from tests.support.numerics import assert_contract

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
HALF = torch.bfloat16


def plan(fn: Any, *args: Any, device: str = "cuda:sm90", **options: Any) -> dict:
    torch._dynamo.reset()
    told = dry_run(fn, args, device=device, options=options)
    assert not [graph.error for graph in told.graphs if graph.error], str(told)
    return told.regions()


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- attention ------------------------------------------------------------------------------------


def attend(**more: Any) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **more)

    return attention


@pytest.mark.parametrize(
    ("device", "dtype", "taker"),
    [
        ("cuda:sm80", HALF, "mha"),
        ("cuda:sm90", HALF, "cudnn"),
        ("cuda:sm90", torch.float32, "mha"),
        ("rocm:gfx942", HALF, "mha"),
    ],
)
def test_many_queries(device: str, dtype: torch.dtype, taker: str) -> None:
    q = meta(2, 4, 64, 64, dtype=dtype)
    assert plan(attend(is_causal=True), q, q, q, device=device) == {("attention", taker): 1}


@pytest.mark.parametrize(
    ("device", "taker"),
    [
        ("cuda:sm80", "mha"),
        ("cuda:sm90", "cudnn"),
        ("cuda:sm120", "mha"),
        ("rocm:gfx942", "triton"),
    ],
)
def test_a_step_of_decoding(device: str, taker: str) -> None:
    q, k = meta(2, 8, 1, 64), meta(2, 2, 500, 64)
    step = attend(enable_gqa=True, scale=0.3)
    with torch.no_grad():
        assert plan(step, q, k, k, device=device) == {("attention", taker): 1}
        named = plan(step, q, k, k, device=device, provider="triton")
        assert named == {("attention", "triton"): 1}


REFUSED: dict[str, dict[str, Any]] = {
    "a mask": {"attn_mask": torch.zeros(1, 500, dtype=torch.bool)},
    "is_causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_step_that_the_kernel_does_not_take(why: str) -> None:
    q, k = torch.randn(1, 8, 1, 64).to(HALF), torch.randn(1, 8, 500, 64).to(HALF)
    with torch.no_grad():
        told = plan(attend(**REFUSED[why]), q, k, k, device="rocm:gfx942")
    assert told == {("attention", "mha"): 1}


MASKS = [(torch.bool, 704, "cudnn"), (HALF, 704, "cudnn"), (torch.float32, 704, "mha")]


@pytest.mark.parametrize(("dtype", "keys", "taker"), MASKS)
def test_masks_that_cudnn_reads_wrongly_go_to_others(
    dtype: torch.dtype, keys: int, taker: str
) -> None:
    """In inference; and what stands in the graph then is a call that leaves cuDNN out."""
    q, k, mask = meta(1, 2, 30, 64), meta(1, 2, keys, 64), meta(30, keys, dtype=dtype)
    with torch.no_grad():
        assert plan(masked, q, k, mask) == {("attention", taker): 1}
        first = backends_of(masked, q, k, mask)
    assert first == {"cudnn": "CUDNN", "mha": "MATH"}[taker]


@pytest.mark.parametrize(("keys", "taker"), [(704, "mha"), (640, "cudnn"), (700, "cudnn")])
def test_lengths_whose_gradients_cudnn_gets_wrong_under_a_mask(keys: int, taker: str) -> None:
    q, k, mask = meta(1, 2, 30, 64), meta(1, 2, keys, 64), meta(30, keys, dtype=torch.bool)
    assert plan(masked, q.requires_grad_(), k, mask) == {("attention", taker): 1}
    assert backends_of(masked, q, k, mask) == {"cudnn": "CUDNN", "mha": "FLASH"}[taker]
    whole = plan(lambda q, k: masked(q, k, None), q, k)
    assert whole == {("attention", "cudnn"): 1}


def masked(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def backends_of(function: Callable[..., Tensor], *inputs: Any) -> str:
    """The first of torch's kernels that the lowered call permits."""
    from torch.nn.attention import sdpa_kernel

    permitted: list[Any] = []

    def watch(order: Any, **more: Any) -> Any:
        permitted.append(order[0].name.partition("_")[0])
        return sdpa_kernel(order, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention, "sdpa_kernel", watch)
        plan(function, *inputs)
    return str(permitted[0])


@pytest.mark.parametrize(("version", "taker"), [(91400, "mha"), (91900, "cudnn")])
def test_an_old_cudnn_is_left_alone(
    version: int, taker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_version_here", lambda: version)
    q = meta(1, 2, 30, 64)
    with torch.no_grad():
        assert plan(attend(), q, q, q) == {("attention", taker): 1}


def test_training_and_float32_steps_are_left_to_torch() -> None:
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 30, 16)
    assert plan(attend(), q.requires_grad_(), k, k) == {("attention", "mha"): 1}
    with torch.no_grad():
        assert plan(attend(), q, k, k) == {("attention", "mha"): 1}


def test_two_queries_see_all_keys_as_torch_has_it() -> None:
    q, k = torch.randn(1, 2, 2, 16).to(HALF), torch.randn(1, 2, 30, 16).to(HALF)
    with torch.no_grad():
        assert plan(attend(), q, k, k) == {("attention", "cudnn"): 1}


@pytest.mark.parametrize("written", ["expand", "whole"])
def test_heads_that_were_repeated_are_read_once(written: str) -> None:
    """As transformers repeats them for a mask, or as torch's own argument does."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if written == "whole":
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        many = [x[:, :, None, :, :].expand(2, 2, 4, 40, 16).reshape(2, 8, 40, 16) for x in (k, v)]
        return functional.scaled_dot_product_attention(q, *many)

    q, k, v = (torch.randn(s).to(HALF) for s in ((2, 8, 1, 16), (2, 2, 40, 16), (2, 2, 40, 16)))
    compiled, backend = lowered(attention, "rocm:gfx942")
    with torch.no_grad():
        got, own = compiled(q, k, v), attention(q, k, v)
        truth = attention(q.double(), k.double(), v.double())
    assert_contract(got, own, truth, written)
    assert backend.regions() == {("attention", "triton"): 1}
    launches = [kernel.launch for graph in backend.graphs for kernel in graph.kernels]
    keys = [x for x in launches[0].arguments.values() if isinstance(x, Tensor) and 40 in x.shape]
    assert keys
    assert all(x.shape[1] == 2 for x in keys)


# --- losses ---------------------------------------------------------------------------------------

WIDE = 1 << 16


@pytest.mark.parametrize(("classes", "taker"), [(WIDE, "triton"), (1000, "inductor")])
def test_cross_entropy(classes: int, taker: str) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits, target, label_smoothing=0.1)

    logits, target = torch.randn(6, classes, requires_grad=True), torch.randint(classes, (6,))
    target[2] = -100
    compiled, backend = lowered(loss, "cuda:sm90")
    got, own = compiled(logits, target), loss(logits, target)
    grads = [torch.autograd.grad(out, logits)[0] for out in (got, own)]
    wide = logits.detach().double().requires_grad_()
    truth = loss(wide, target)
    assert_contract(got.detach(), own.detach(), truth.detach(), "loss")
    assert_contract(grads[0], grads[1], torch.autograd.grad(truth, wide)[0], "gradient")
    assert backend.regions() == {("cross_entropy", taker): 1}
    assert bool(backend.kernels()) == (taker == "triton")


@pytest.mark.parametrize("kind", ["probabilities", "images"])
def test_losses_of_another_kind_are_no_region(kind: str) -> None:
    logits = torch.randn(2, WIDE, 3) if kind == "images" else torch.randn(2, WIDE)
    target = torch.randint(WIDE, (2, 3)) if kind == "images" else torch.rand(2, WIDE)
    assert plan(functional.cross_entropy, logits, target) == {}


class Head(nn.Module):
    def __init__(self, size: int, classes: int, dtype: torch.dtype, device: str = "meta") -> None:
        super().__init__()
        self.linear = nn.Linear(size, classes, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(hidden).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), target.flatten())


class HeadWithLogits(Head):
    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        logits = self.linear(hidden).flatten(0, 1)
        return functional.cross_entropy(logits, target.flatten()), logits


def test_logits_of_a_gigabyte_are_never_held() -> None:
    hidden, target = meta(2, 1024, 64), torch.empty(2, 1024, dtype=torch.int64, device="meta")
    told = plan(Head(64, 1 << 17, HALF), hidden, target)
    assert told[("linear_cross_entropy", "triton")] == 1
    assert ("cross_entropy", "triton") not in told


def test_logits_that_somebody_else_reads_stay() -> None:
    hidden, target = meta(2, 1024, 64), torch.empty(2, 1024, dtype=torch.int64, device="meta")
    told = plan(HeadWithLogits(64, 1 << 17, HALF), hidden, target)
    assert ("linear_cross_entropy", "triton") not in told
    assert told[("cross_entropy", "triton")] == 1


def test_a_loss_with_its_layer_has_the_gradients_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowering.regions.cross_entropy import LinearCrossEntropy

    real = LinearCrossEntropy.work
    grown = lambda self: torch.utils._pytree and _with_bytes(real(self), 1 << 31)  # noqa: E731
    monkeypatch.setattr(LinearCrossEntropy, "work", grown)  # as if it had a gigabyte of logits
    head = Head(8, 50, torch.float32, "cpu")
    hidden, target = torch.randn(2, 7, 8, requires_grad=True), torch.randint(50, (2, 7))
    compiled, backend = lowered(head, "cuda:sm90")

    def run(module: Any, x: Tensor) -> list[Tensor]:
        loss = module(x, target)
        return [loss.detach(), *torch.autograd.grad(loss, (x, *head.parameters()))]

    got, own = run(compiled, hidden), run(head, hidden)
    head.double()
    head.forward = lambda x, t: functional.cross_entropy(  # type: ignore[method-assign]
        head.linear(x).flatten(0, 1), t.flatten()
    )
    truth = run(head, hidden.detach().double().requires_grad_())
    assert_contract(got, own, truth, "loss and gradients")
    assert backend.regions()[("linear_cross_entropy", "triton")] == 1


def _with_bytes(work: Any, size: int) -> Any:
    import dataclasses

    return dataclasses.replace(work, bytes_moved=size)


# --- linear layers --------------------------------------------------------------------------------


def two_of_four(weight: Tensor) -> Tensor:
    """With the first two of every four numbers set to zero."""
    return weight * torch.tensor([0.0, 0, 1, 1], dtype=weight.dtype).repeat(weight.shape[1] // 4)


def test_weights_with_two_zeros_of_four() -> None:
    sparse, dense = (nn.Linear(512, 512, dtype=HALF) for _ in range(2))
    with torch.no_grad():
        sparse.weight.copy_(two_of_four(sparse.weight))
        x = torch.randn(1024, 512, dtype=HALF)
        told = plan(nn.Sequential(sparse, dense), x)
        assert told == {("linear", "cusparselt"): 1, ("linear", "inductor"): 1}
        assert plan(sparse, x, device="rocm:gfx942") == {("linear", "inductor"): 1}
    assert ("linear", "cusparselt") not in plan(sparse, x.float().to(HALF).requires_grad_())


def test_weights_that_lose_their_zeros_are_multiplied_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compressed: list[Tensor] = []
    monkeypatch.setattr(
        torch.sparse, "to_sparse_semi_structured", lambda w: compressed.append(w) or w
    )
    weight = two_of_four(torch.randn(64, 64))
    x, bias = torch.randn(3, 5, 64), torch.randn(64)
    for _ in range(2):
        got = torch.ops.kernel_dispatch.cusparselt_linear(x, weight, bias)
        torch.testing.assert_close(got, functional.linear(x, weight, bias))
    assert len(compressed) == 1
    weight.fill_(0.5)
    got = torch.ops.kernel_dispatch.cusparselt_linear(x, weight, bias)
    torch.testing.assert_close(got, functional.linear(x, weight, bias))
    assert len(compressed) == 1
    assert not cusparselt.is_two_of_four(weight)


def test_rows_that_see_calls_want_no_whole_operators() -> None:
    """Only kernels that absorb activations do; for them the graph is traced a second time."""
    from lowering.contract import Request
    from lowering.levels import Level
    from lowering.providers.inductor import _wants_whole_operators
    from lowering.targets import cpu, cuda

    def wanted(target: Any) -> bool:
        graph = torch.fx.symbolic_trace(nn.Identity())
        return _wants_whole_operators(Request(graph, (), Level.O3, False, target.rows))

    assert wanted(cpu.TARGET)
    assert not wanted(cuda.TARGET)


def test_a_cpu_graph_beside_a_gpu_asks_for_the_kernels_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU brings torch's fused kernels, and no compiler for those of the CPU."""
    from lowering.contract import Probe
    from lowering.native import library
    from lowering.providers import mha

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "probe", lambda: Probe.no("no compiler here"))
    assert mha.PROVIDER.probe().available
    assert mha.PROVIDER.regions["attention"].refuses(None) == "no compiler here"


FEW, MANY = 4, 4096


@pytest.mark.parametrize(
    ("rows", "device", "tolerance", "taker"),
    [
        (FEW, "cuda:sm90", None, "triton"),
        (FEW, "rocm:gfx942", None, "triton"),
        (FEW, "cuda:sm90", 0.0, "inductor"),
        (MANY, "cuda:sm90", None, "inductor"),
        (MANY, "cuda:sm90", 0.05, "triton"),
        (MANY, "cuda:sm80", 0.05, "inductor"),
    ],
)
def test_fewer_bits_at_o3(rows: int, device: str, tolerance: float | None, taker: str) -> None:
    layer = nn.Linear(1024, 4096, dtype=HALF, device="meta")
    more = {} if tolerance is None else {"tolerance": tolerance}
    with torch.no_grad():
        told = plan(layer, meta(rows, 1024), device=device, level="O3", **more)
        assert told == {("linear", taker): 1}
        assert plan(layer, meta(rows, 1024), device=device, **more) == {("linear", "inductor"): 1}


class Listener:
    """What a report does with what runs."""

    keeps_memory = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.told: list[Any] = []

    def region_ran(self, region: str, provider: str, times: int = 1) -> None:
        self.told.append((region, provider))

    def kernels_ran(self, ran: int) -> None:
        raise AssertionError("a kernel of the CPU's library ran")

    def region_demoted(self, region: str, provider: str, reason: Any) -> None:
        self.told.append(reason.code)


def listen(tolerance: float, *args: Any) -> tuple[Tensor, list[Any]]:
    """The operator as it stands in a graph, behind what makes its weight ready."""
    *_, kind = args
    run = reduced_linear.made_ready(reduced_linear.OPERATOR, [(1, kind)], reduced_linear.OPERATOR)
    return told(tolerance, run, *args)


def told(tolerance: float, run: Callable[..., Tensor], *args: Any) -> tuple[Tensor, list[Any]]:
    from lowering.observing import listened

    listener = Listener(tolerance)
    return listened(listener, run, args), listener.told


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("fp8", 0.06)])
def test_a_layer_in_fewer_bits_within_the_tolerance(kind: str, tolerance: float) -> None:
    x, weight, bias = torch.randn(3, 5, 64), torch.randn(32, 64), torch.randn(32)
    exact = functional.linear(x, weight, bias)
    for _ in range(2):
        got, told = listen(tolerance, x, weight, bias, kind)
        assert told == [("linear", "triton")]
        assert 1e-4 < distance(got, exact) < tolerance
    weight.mul_(-1)
    got, _ = listen(tolerance, x, weight, bias, kind)
    assert distance(got, functional.linear(x, weight, bias)) < tolerance


def test_what_a_cuda_graph_replays_follows_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A played recording: its launches read the addresses that the weight had in eight bits."""
    x, weight, kind = torch.randn(4, 64), torch.randn(32, 64), "int8"
    args, replayed = (x, weight, None, kind), []

    def run(*args: Any) -> Tensor:
        if not replayed:
            return reduced_linear.OPERATOR(*args)
        return functional.linear(x, replayed[0].values.float() * replayed[0].scale[:, None])

    def exact(*args: Any) -> Tensor:
        return functional.linear(x, weight)

    def call(tolerance: float = 0.02) -> tuple[float, list[Any]]:
        ready = reduced_linear.made_ready(run, [(1, kind)], exact)
        got, seen = told(tolerance, ready, *args)
        return distance(got, exact()), seen

    error, seen = call()  # where torch warms up, nothing is recorded
    assert 1e-4 < error < 0.02 and seen == [("linear", "triton")]
    monkeypatch.setattr(reduced_linear, "_recording", lambda x: True)
    assert call()[1] == [("linear", "triton")]
    replayed.append(reduced_linear._found(weight, kind))
    weight.copy_(torch.randn(32, 64))
    error, seen = call()
    assert 1e-4 < error < 0.02 and seen == [("linear", "triton")]
    with torch.no_grad():  # one number takes all the bits of its row
        weight[:, 0] = 1e6
    x[:, 0] = 0.0
    assert call(1e-6) == (0.0, ["over-tolerance"])
    assert call(1e-6) == (0.0, [])


def test_nothing_is_compared_while_a_cuda_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    monkeypatch.setattr(reduced_linear, "_recording", lambda x: True)
    assert torch.equal(listen(0.02, x, weight, None, "int8")[0], functional.linear(x, weight))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_reset_gives_back_what_no_cuda_graph_reads(recorded: bool) -> None:
    weight = torch.randn(32, 64)
    first = reduced_linear._found(weight, "int8")
    first.recorded = recorded
    packing.forget()
    assert (reduced_linear._found(weight, "int8") is first) is recorded


def test_a_layer_that_is_too_far_off_stays_as_it_is_and_is_told_once() -> None:
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    exact = functional.linear(x, weight)
    seen = [listen(1e-6, x, weight, None, "int8") for _ in range(3)]
    assert [told for _, told in seen] == [["over-tolerance"], [], []]
    assert all(torch.equal(got, exact) for got, _ in seen)


def test_the_operators_keep_the_rules_of_torch() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64, 64)
    rules = ("test_schema", "test_faketensor")
    for op, args in (
        (reduced_linear.reduced_linear, (x, weight, None, "int8")),
        (cusparselt.cusparselt_linear, (x, weight, None)),
    ):
        torch.library.opcheck(op, args, test_utils=rules)


# --- rotations ------------------------------------------------------------------------------------


def rotations(normed: bool, repeats: bool) -> Callable[..., Any]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def compute(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, angle: Tensor) -> Any:
        both = torch.cat((angle, angle if repeats else angle + 1), -1)[:, None]
        cos, sin = both.cos().to(q.dtype), both.sin().to(q.dtype)
        if normed:
            q, k = norm(q, qw), norm(k, kw)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return turned(q, cos, sin), turned(k, cos, sin)

    return compute


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rotations(normed: bool, repeats: bool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(s, dtype=dtype) for s in ((2, 5, 4, 32), (2, 5, 2, 32), (32,), (32,))]
    angle = torch.randn(2, 5, 16)
    compute = rotations(normed, repeats)
    compiled, backend = lowered(compute, "cuda:sm90")
    with torch.no_grad():
        got, own = compiled(*inputs, angle), compute(*inputs, angle)
        with double_by_default():
            truth = compute(*to_reference(inputs), angle.double())
    assert_contract(got, own, truth, "rotation")
    assert [x.stride() for x in got] == [x.stride() for x in own]
    assert backend.regions()[("rope", "inductor")] == 1
    assert not backend.kernels()
