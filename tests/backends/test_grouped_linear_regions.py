"""Layers of mixtures of experts: each spelling is taken, with its gate, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowering.native import library
from tests.support.numerics import assert_contract
from tests.support.regions import (
    assert_regions,
    compile_in,
    details,
    kernels,
    no_cached_graphs,
    region_rows,
)
from tests.support.reports import fallbacks_of

transformers = pytest.importorskip("transformers")

Tensor = torch.Tensor
EXPERTS, INNER, OUTER = 5, 96, 64
COUNTS = (7, 0, 20, 3, 1)


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    kernels()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: Any) -> torch.dtype:
    if request.param is not torch.float32 and not library.multiplies(request.param):
        pytest.skip(f"{request.param} is not multiplied here")
    return request.param


def _operator(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What transformers calls in a graph: torch's own operator takes bfloat16 only there."""
    from transformers.integrations import moe  # noqa: F401  # it makes the other operator

    if dtype is not torch.bfloat16:
        return torch.ops.transformers.grouped_mm_fallback
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped products")
    return lambda rows, weight, ends: torch._grouped_mm(rows, weight, offs=ends)


class Grouped(nn.Module):
    """Rows that lie by expert, through a layer and what `follows` makes of its outputs."""

    def __init__(
        self, dtype: torch.dtype, follows: Callable[[Tensor], Tensor], in_out: bool = False
    ) -> None:
        super().__init__()
        sizes = (INNER, 2 * OUTER) if in_out else (2 * OUTER, INNER)
        self.weight = nn.Parameter(torch.randn(EXPERTS, *sizes).to(dtype) / INNER**0.5)
        self.product, self.follows, self.in_out = _operator(dtype), follows, in_out

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        weight = self.weight if self.in_out else self.weight.transpose(-2, -1)
        return self.follows(self.product(rows, weight, ends))

    def exact(self, rows: Tensor) -> Tensor:
        weight = self.weight.double() if self.in_out else self.weight.double().mT
        parts = zip(rows.double().split(COUNTS), weight, strict=True)
        return self.follows(torch.cat([rows @ matrix for rows, matrix in parts]))


def _rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    return torch.randn(sum(COUNTS), INNER).to(dtype), ends


def _first_half(sums: Tensor) -> Tensor:
    factor, other = sums.chunk(2, dim=-1)
    return functional.silu(factor) * other


def _second_half(sums: Tensor) -> Tensor:
    return sums[:, :OUTER] * functional.gelu(sums[:, OUTER:], approximate="tanh")


def _counted_from_the_end(sums: Tensor) -> Tensor:
    return functional.silu(sums[:, :-OUTER]) * sums[:, -OUTER:]


def _unequal_parts(sums: Tensor) -> Tensor:
    one, other = sums.split([OUTER // 2, 3 * OUTER // 2], dim=1)
    return torch.cat([functional.silu(one), other], dim=1) * 2


def _by_turns(sums: Tensor) -> Tensor:
    return functional.silu(sums[:, ::2]) * sums[:, 1::2]


def _the_whole_is_read(sums: Tensor) -> Tensor:
    factor, other = sums.chunk(2, dim=-1)
    return torch.cat([functional.silu(factor) * other, sums], dim=1)


def _rows_in_halves(sums: Tensor) -> Tensor:
    return sums[: sums.shape[0] - 1] * functional.silu(sums[1:])


def _the_same_half_twice(sums: Tensor) -> Tensor:
    return functional.silu(sums[:, :OUTER]) * sums[:, :OUTER]


FOLLOWS = {
    "": [lambda sums: sums * 2, _unequal_parts, _by_turns, _the_whole_is_read]
    + [_rows_in_halves, _the_same_half_twice],
    "relu": [functional.relu],
    "silu+mul": [_first_half, _counted_from_the_end],
    "gelu_tanh+mul": [_second_half],
}
CASES = [(steps, follows) for steps, some in FOLLOWS.items() for follows in some]


@pytest.mark.parametrize(
    ("steps", "follows"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_follows(dtype: torch.dtype, steps: str, follows: Callable[[Tensor], Tensor]) -> None:
    model, (rows, ends) = Grouped(dtype, follows).eval(), _rows(dtype)
    with no_cached_graphs(), torch.no_grad():
        compiled = compile_in("O2 openmp", model, dynamic=False)
        assert_contract(compiled(rows, ends), model(rows, ends), model.exact(rows), steps)
    assert_regions(compiled, ("grouped_linear", "openmp", 1, 1))
    assert details(compiled, "grouped_linear") == [f"with {steps}" if steps else ""]


def test_weights_that_are_stored_the_other_way_round(dtype: torch.dtype) -> None:
    """Of float32 torch's own products are as fast, and are left to it."""
    model, (rows, ends) = Grouped(dtype, _first_half, in_out=True).eval(), _rows(dtype)
    with torch.no_grad():
        compiled = compile_in("O2 openmp", model, dynamic=False)
        assert_contract(compiled(rows, ends), model(rows, ends), model.exact(rows), "in_out")
    taken = [("grouped_linear", "openmp", 1, 1)] if dtype is not torch.float32 else []
    assert_regions(compiled, *taken)


def test_any_number_of_rows(dtype: torch.dtype) -> None:
    model = Grouped(dtype, _first_half).eval()
    compiled = compile_in("O2 openmp", model, dynamic=True)
    for times in (1, 2, 9):
        rows, ends = _rows(dtype)
        rows, ends = rows.repeat(times, 1), (ends * times).to(torch.int32)
        with torch.no_grad():
            got, own = compiled(rows, ends), model(rows, ends)
            exact = torch.cat([model.product(rows.to(dtype), model.weight.mT, ends)]).double()
        assert_contract(got, own, _first_half(exact), str(times))
    assert not fallbacks_of(compiled)
    assert sum(runs for *_, runs in region_rows(compiled)) == 3


def test_a_changed_weight_shows(dtype: torch.dtype) -> None:
    """Even through `.data`: no other form of it is kept."""
    model, (rows, ends) = Grouped(dtype, _first_half).eval(), _rows(dtype)
    compiled = compile_in("O2 openmp", model, dynamic=False)
    with torch.no_grad():
        compiled(rows, ends)
        model.weight.data[2, 3:9] *= 3
        assert_contract(compiled(rows, ends), model(rows, ends), model.exact(rows), "changed")


def test_gradients() -> None:
    model, (rows, ends) = Grouped(torch.float32, _first_half), _rows(torch.float32)
    compiled = compile_in("O2 openmp", model, dynamic=False)
    factors = torch.randn(len(rows), OUTER)

    def gradients(result: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
        (result * factors).sum().backward()
        found = (rows.grad, model.weight.grad)
        rows.grad = model.weight.grad = None
        return found  # type: ignore[return-value]

    rows.requires_grad_()
    got = gradients(compiled(rows, ends), factors)
    own = gradients(model(rows, ends), factors)
    exact = gradients(model.exact(rows), factors.double())
    assert_contract(got, own, exact, "gradients")
    assert ("grouped_linear", "openmp", 1, 1) in region_rows(compiled)


# --- weights that are looked up -------------------------------------------------------------------


class LookedUp(nn.Module):
    def __init__(
        self, dtype: torch.dtype, spelling: Callable[[Any, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUTER, INNER).to(dtype) / INNER**0.5)
        self.turned = nn.Parameter(self.weight.detach().mT.contiguous())
        self.spelling = spelling

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return self.spelling(self, rows, chosen)


def _batched(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    """As transformers has it: each row once for each of its experts."""
    repeated = rows.repeat_interleave(chosen.shape[1], dim=0).unsqueeze(-1)
    return torch.bmm(model.weight[chosen.reshape(-1)], repeated).squeeze(-1)


def _batched_turned(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    repeated = rows.repeat_interleave(chosen.shape[1], dim=0).unsqueeze(1)
    return torch.bmm(repeated, model.turned[chosen.reshape(-1)]).squeeze(1)


def _einsum(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    """As gpt-fast has it."""
    return torch.einsum("ti,taoi->tao", rows, model.weight[chosen])


def _einsum_turned(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("ti,taio->tao", rows, model.turned[chosen])


def _matmul(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    of_all = rows[:, None, :, None].expand(-1, chosen.shape[1], -1, -1)
    return torch.matmul(model.weight[chosen], of_all)[..., 0]


SPELLINGS = (_batched, _batched_turned, _einsum, _einsum_turned, _matmul)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda one: one.__name__.strip("_"))
def test_lookups(dtype: torch.dtype, spelling: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    model = LookedUp(dtype, spelling).eval()
    compiled = compile_in("O2 openmp", model, dynamic=False)
    for tokens in (1, 3, 40):
        rows, chosen = torch.randn(tokens, INNER).to(dtype), torch.randint(-2, EXPERTS, (tokens, 2))
        exact = torch.einsum("ti,taoi->tao", rows.double(), model.weight.double()[chosen])
        with torch.no_grad():
            got, own = compiled(rows, chosen), model(rows, chosen)
        assert got.stride() == own.stride()
        assert_contract(got, own, exact.reshape(own.shape), f"{spelling.__name__} {tokens}")
    assert_regions(compiled, *[("grouped_linear", "openmp", 1, 1)] * 3)


def test_lookups_of_any_number_of_tokens() -> None:
    model = LookedUp(torch.float32, _einsum).eval()
    compiled = compile_in("O2 openmp", model)
    for tokens in (3, 8):
        rows, chosen = torch.randn(tokens, INNER), torch.randint(EXPERTS, (tokens, 2))
        torch._dynamo.mark_dynamic(rows, 0)
        torch._dynamo.mark_dynamic(chosen, 0)
        exact = torch.einsum("ti,taoi->tao", rows.double(), model.weight.double()[chosen])
        with torch.no_grad():
            assert_contract(compiled(rows, chosen), model(rows, chosen), exact, str(tokens))
    assert region_rows(compiled) == [("grouped_linear", "openmp", 1, 2)]


def test_a_number_beyond_the_weights_is_eagers_error() -> None:
    model = LookedUp(torch.float32, _batched).eval()
    compiled = compile_in("O2 openmp", model, dynamic=False)
    rows, chosen = torch.randn(3, INNER), torch.tensor([[0, 1], [4, 2], [1, 5]])
    with torch.no_grad():
        with pytest.raises(
            IndexError, match="index 5 is out of bounds for dimension 0 with size 5"
        ):
            model(rows, chosen)
        with pytest.raises(
            IndexError, match="index 5 is out of bounds for dimension 0 with size 5"
        ):
            compiled(rows, chosen)


@pytest.mark.parametrize(
    "numbers",
    [
        lambda chosen: chosen.clamp(0, 3),
        lambda chosen: chosen[:, 0] % 4,
        lambda chosen: torch.where(chosen > 2, 1, chosen - 1),
    ],
    ids=["limited", "remainders", "others"],
)
@pytest.mark.parametrize(
    "behind",
    [
        lambda sums: sums.sum(0),
        lambda sums: functional.rms_norm(sums, sums.shape[-1:]),
        lambda sums: sums.softmax(-1),
        lambda sums: torch.bmm(sums.unsqueeze(-1), sums.unsqueeze(1)),
    ],
    ids=["summed", "norm", "softmax", "product"],
)
def test_computed_numbers_and_what_reads_the_result(
    numbers: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]
) -> None:
    """Later passes ask every node for its value."""

    def compute(rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        found = numbers(chosen)
        repeated = rows.repeat_interleave(found.numel() // len(rows), dim=0).unsqueeze(-1)
        return behind(torch.bmm(weight[found.reshape(-1)], repeated).squeeze(-1))

    rows, weight = torch.randn(40, 64), torch.randn(EXPERTS, 48, 64)
    chosen = torch.randint(EXPERTS, (40, 2))
    compiled = compile_in("O2 openmp", compute, dynamic=False, fullgraph=True)
    with torch.no_grad():
        got, own = compiled(rows, weight, chosen), compute(rows, weight, chosen)
        assert_contract(got, own, compute(rows.double(), weight.double(), chosen), "computed")
    assert not fallbacks_of(compiled)
    assert ("grouped_linear", "openmp", 1, 1) in region_rows(compiled)


def _view_read_besides(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    found = model.weight[chosen[:, 0]].mT
    return torch.bmm(rows.unsqueeze(1), found).squeeze(1) + found.sum(1)


def _two_rows_of_each(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    pairs = torch.stack([rows, rows * 2], dim=2)
    return torch.bmm(model.weight[chosen[:, 0]], pairs)


def _read_besides(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    found = model.weight[chosen[:, 0]]
    return torch.bmm(found, rows.unsqueeze(-1)) + found.sum(-1, keepdim=True)


def _experts_before_tokens(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("ti,atoi->tao", rows, model.weight[chosen.t()])


def _summed_over_experts(model: LookedUp, rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("ti,taoi->to", rows, model.weight[chosen])


@pytest.mark.parametrize(
    "other",
    [
        *(_two_rows_of_each, _read_besides, _view_read_besides),
        *(_experts_before_tokens, _summed_over_experts),
    ],
    ids=lambda one: one.__name__.strip("_"),
)
def test_other_products_of_lookups(other: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    model = LookedUp(torch.float32, other).eval()
    compiled = compile_in("O2 openmp", model, dynamic=False)
    rows, chosen = torch.randn(6, INNER), torch.randint(EXPERTS, (6, 2))
    with torch.no_grad():
        got, own = compiled(rows, chosen), model(rows, chosen)
        wide = LookedUp(torch.float64, other).eval()
        wide.load_state_dict(model.state_dict())
        assert_contract(got, own, wide(rows.double(), chosen), other.__name__)
    assert not fallbacks_of(compiled)
    assert "grouped_linear" not in [name for name, *_ in region_rows(compiled)]


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_models(dtype: torch.dtype, kind: str, experts: str) -> None:
    """Of GPT-OSS the weights are (in, out), with biases and the gate's columns by turns."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
        # All of them: in bfloat16 it is a matter of rounding who is chosen.
        num_local_experts=3,
        num_experts_per_tok=3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval().to(dtype)
    model.set_experts_implementation(experts)
    compiled = compile_in("O2 openmp", model, dynamic=False)
    tokens = torch.randint(0, 99, (2, 7))
    with torch.no_grad():
        got, own = (one(tokens).last_hidden_state for one in (compiled, model))
        model.set_experts_implementation("batched_mm")  # which takes float64
        exact = model.double()(tokens).last_hidden_state
    assert_contract(got, own, exact, kind)
    assert not fallbacks_of(compiled)
    taken = [row for row in region_rows(compiled) if row[0] == "grouped_linear"]
    left = (kind, experts, dtype) == ("GptOss", "grouped_mm", torch.float32)
    assert taken == ([] if left else [("grouped_linear", "openmp", 4, 4)])
