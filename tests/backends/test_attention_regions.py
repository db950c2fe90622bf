"""The attention region: torch's own operator, and attention written out, by our fused kernel."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support import torches
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of
from tests.support.numerics import assert_contract
from tests.support.regions import assert_regions, hold, no_cached_graphs, region_rows
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor
attend = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies():
        yield


def qkv(
    heads: int, queries: int, keys: int, size: int, key_heads: int = 0, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (batch, key_heads or heads, keys, size)
    return torch.randn(batch, heads, queries, size), torch.randn(shape), torch.randn(shape)


def check(function: Any, *inputs: Tensor, taken: int, **kwargs: Any) -> Any:
    model = Of(lambda m, *args: function(*args))
    compiled = compile_at("O2", model, **kwargs)
    hold(compiled, model, *inputs)
    rows = [("attention", "mha", taken, taken)] if taken else []
    assert [row for row in region_rows(compiled) if row[0] == "attention"] == rows
    assert_ran_as_planned(compiled, "O2")
    return compiled


def test_head_sizes_and_lengths() -> None:
    problems = [
        qkv(heads, queries, keys, size)
        for heads, queries, keys, size in [
            (2, 5, 5, 16), (1, 33, 65, 32), (3, 17, 9, 24), (2, 64, 64, 64), (1, 20, 130, 80),
            (2, 7, 40, 128), (1, 12, 12, 33), (4, 1, 77, 64), (2, 3, 300, 8),
        ]
    ]  # fmt: skip

    def each(*inputs: Tensor) -> list[Tensor]:
        parts = [inputs[i : i + 3] for i in range(0, len(inputs), 3)]
        return [attend(*part) for part in parts] + [attend(*part, scale=0.1) for part in parts]

    check(each, *(tensor for problem in problems for tensor in problem), taken=2 * len(problems))


def test_masks() -> None:
    """Also one that hides every key from a row; what eager makes of that is what has to come."""
    q, k, v = qkv(3, 21, 40, 32)
    plain = torch.rand(21, 40) > 0.3
    per_head = torch.rand(2, 3, 1, 40) > 0.5
    added = torch.randn(2, 1, 21, 40)
    infinite = torch.zeros(21, 40).masked_fill_(~plain, -torch.inf)
    for mask in (plain, per_head):
        mask[..., 0] = True
    infinite[:, 0] = 0
    nothing = plain.clone()
    nothing[4] = False

    def each(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> list[Tensor]:
        found = [attend(q, k, v, mask) for mask in masks]
        return [*found, attend(q, k, v, is_causal=True), attend(q, k[:, :, :9], v[:, :, :9])]

    check(each, q, k, v, plain, per_head, added, infinite, nothing, taken=7)


def test_grouped_heads() -> None:
    if why := torches.no_fused_grouped_heads():
        pytest.skip(why)

    def each(*inputs: Tensor) -> list[Tensor]:
        q, k, v = inputs[:3]
        step, keys, values = inputs[3:]
        return [
            attend(q, k, v, enable_gqa=True),
            attend(q, k, v, is_causal=True, enable_gqa=True),
            attend(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)),
            attend(step, keys, values, enable_gqa=True),
        ]

    check(each, *qkv(8, 19, 33, 32, key_heads=2), *qkv(6, 1, 90, 64, key_heads=1), taken=4)


@pytest.mark.parametrize(("size", "of_values"), [(16, 40), (48, 32), (24, 25)])
def test_values_of_another_size(size: int, of_values: int) -> None:
    """Where torch has no kernel of its own for CPUs, and lays the result in rows."""
    q, k, _ = qkv(4, 21, 40, size)
    v, mask = torch.randn(2, 4, 40, of_values), torch.randn(21, 40)
    nothing = torch.rand(2, 1, 21, 40) > 0.3
    nothing[:, :, 4] = False

    def each(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, nothing: Tensor) -> list[Tensor]:
        return [
            attend(q, k, v),
            attend(q, k, v, mask, scale=0.1).view(2, 4, -1),
            attend(q, k, v, nothing).transpose(1, 2).reshape(2, 21, -1),
            attend(q, k[:, :, :21], v[:, :, :21], is_causal=True)[..., 1:5],
            attend(q[:, :, :1], k, v).transpose(1, 2).flatten(2),
        ]

    check(each, q, k, v, mask, nothing, taken=5)


def test_no_zeros_are_multiplied_for_values_of_another_size() -> None:
    """What is filled up on the way through torch's operator does not reach our kernel."""
    from torch._inductor.utils import run_and_get_code

    q, k, v = qkv(4, 21, 40, 16)
    for values in (torch.cat((v, v), -1), v[..., :8]):
        torch._dynamo.reset()
        with torch.no_grad(), no_cached_graphs():
            _, (code, *_) = run_and_get_code(compile_at("O2", attend), q, k, values)
        assert "mha_attention" in code
        assert "constant_pad" not in code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_of_another_size_in_half_precision(dtype: torch.dtype) -> None:
    q, k, _ = (tensor.to(dtype) for tensor in qkv(4, 19, 40, 24))
    check(attend, q, k, torch.randn(2, 4, 40, 16).to(dtype), taken=1)


def test_values_of_another_size_and_lengths_that_change() -> None:
    model = Of(lambda m, q, k, v: attend(q, k, v).transpose(1, 2).flatten(2))
    compiled = compile_at("O2", model)
    for length in (19, 40, 33):
        q, k, v = qkv(3, length, length, 24)
        v = torch.cat((v, v), -1)
        for tensor in (q, k, v):
            torch._dynamo.mark_dynamic(tensor, 2)
        hold(compiled, model, q, k, v, where=f"{length}")
    assert_regions(compiled, ("attention", "mha", 1, 3))


def test_zeros_of_the_users_own_stay() -> None:
    """They are part of what is multiplied, and of the result."""
    q, k, v = qkv(2, 9, 14, 16)

    def each(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        wide = functional.pad(v, (0, 8))
        return [
            attend(functional.pad(q, (0, 4)), functional.pad(k, (0, 4)), functional.pad(v, (0, 4))),
            attend(functional.pad(q, (0, 8)), functional.pad(k, (0, 8)), wide)[..., :20],
            attend(functional.pad(q, (0, 4)), functional.pad(k, (4, 0)), functional.pad(v, (2, 2))),
        ]

    check(each, q, k, v, taken=3)


class Transformer(nn.Module):
    """One layer as models have it: projections, heads side by side in memory, a residual."""

    def __init__(self, heads: int = 4, size: int = 16) -> None:
        super().__init__()
        width = heads * size
        self.heads, self.size = heads, size
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        fused = self.into(self.norm(x)).view(batch, length, 3, self.heads, self.size)
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))
        y = attend(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def test_in_a_transformer() -> None:
    """With regions of every kind, at one size and at sizes that change."""
    model = Transformer().eval()
    compiled = compile_at("O2", model, dynamic=True)
    for batch, length in [(2, 19), (3, 64), (5, 33)]:
        hold(compiled, model, torch.randn(batch, length, 64), where=f"{batch} x {length}")
    assert_regions(compiled, ("attention", "mha", 1, 3), ("linear", "openmp", 2, 6))


def test_views_of_the_output() -> None:
    """Eager's output lies as the query does, and views of it may rely on that."""

    def each(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        across = (t.transpose(1, 2) for t in (q, k, v))
        return [
            functional.gelu(q.abs().sum()),
            attend(q, k, v).view(2, 4, -1),
            attend(*across).transpose(1, 2).view(2, 4, -1),
            attend(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 9, -1),
        ]

    check(each, *qkv(4, 9, 9, 16), taken=3)


def test_written_out() -> None:
    """Products and a softmax in the spellings that Inductor knows."""

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(q.shape[-1]))
        return scores.softmax(dim=-1).matmul(v)

    check(each, *qkv(4, 32, 32, 16), taken=1)


def test_written_out_otherwise() -> None:
    """Whether it is found or not, the numbers hold."""

    def each(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        hidden = scores.masked_fill(mask, -torch.inf)
        weights = torch.softmax(hidden.float(), -1).to(q.dtype)
        return [weights @ v, weights]

    q, k, v = qkv(4, 32, 32, 16)
    model = Of(lambda m, *args: each(*args))
    compiled = compile_at("O2", model)
    hold(compiled, model, q, k, v, torch.ones(32, 32, dtype=torch.bool).triu(1))
    assert_ran_as_planned(compiled, "O2")


def test_decoding() -> None:
    """One token at a time against a cache of a fixed length, of which a part is used."""

    def step(m: Any, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = m.into(x).view(1, 1, 3, 4, 16).unbind(2)
        m.keys.index_copy_(2, position, k.transpose(1, 2))
        m.values.index_copy_(2, position, v.transpose(1, 2))
        seen = torch.arange(m.keys.shape[2]) <= position
        return attend(q.transpose(1, 2), m.keys, m.values, seen[None, None, None])

    cache = torch.zeros(1, 4, 48, 16)
    model = Of(step, into=nn.Linear(64, 192), keys=cache.clone(), values=cache.clone())
    twin = copy.deepcopy(model)
    compiled = compile_at("O2", model)
    with torch.no_grad():
        for position in range(40):
            x = torch.randn(1, 1, 64)
            where = torch.tensor([position])
            reference = copy.deepcopy(twin).double()(x.double(), where)
            assert_contract(compiled(x, where), twin(x, where), reference, f"token {position}")
    torch.testing.assert_close(model.keys, twin.keys)
    assert_regions(compiled, ("attention", "mha", 1, 40), ("linear", "openmp", 1, 40))


def test_keys_that_grow() -> None:
    """The cache of a generation loop without a fixed length: one graph for every length."""
    model = Of(lambda m, q, k, v: attend(q, k, v))
    compiled = compile_at("O2", model)
    lengths = [2, 3, 15, 16, 17, 63, 65, 128, 200, 300]
    for keys in lengths:
        q, k, v = qkv(4, 1, keys, 32)
        for tensor in (k, v):
            torch._dynamo.mark_dynamic(tensor, 2)
        hold(compiled, model, q, k, v, where=f"{keys} keys")
    assert_regions(compiled, ("attention", "mha", 1, len(lengths)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in qkv(4, 19, 40, 32))
    mask = torch.randn(19, 40).to(dtype)

    def each(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
        return [
            attend(q, k, v),
            attend(q, k, v, mask),
            attend(q[:, :, :1], k, v, mask[:1] > 0.5 * 0 + mask[:1].amin()),
        ]

    check(each, q, k, v, mask, taken=3)


def test_autocast() -> None:
    model, x = Transformer().eval(), torch.randn(2, 19, 64)
    compiled = compile_at("O2", model)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert_contract(compiled(x), model(x), reference, "autocast")
    assert ("attention", "mha", 1, 1) in region_rows(compiled)
    assert_ran_as_planned(compiled, "O2")


def test_what_is_not_taken() -> None:
    """Gradients, dropout that drops, disabled kernels, the level of library calls."""
    q, k, v = qkv(2, 9, 9, 16)
    training = compile_at("O2", attend)
    wanted = q.clone().requires_grad_()
    training(wanted, k, v).sum().backward()
    mine, wanted.grad = wanted.grad, None
    attend(wanted, k, v).sum().backward()
    torch.testing.assert_close(mine, wanted.grad)
    assert not [row for row in region_rows(training) if row[1] == "mha"]
    for level, options in [("O2", {"disable": ["mha"]}), ("O1", {})]:
        torch._dynamo.reset()
        compiled = compile_at(level, attend, options=options)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
        assert not [row for row in region_rows(compiled) if row[0] == "attention"]
        assert_ran_as_planned(compiled, level)
    torch._dynamo.reset()
    dropping = compile_at("O2", lambda *args: attend(*args, dropout_p=0.5))
    assert dropping(q, k, v).shape == q.shape
    assert not [row for row in region_rows(dropping) if row[0] == "attention"]


def test_empty_tensors() -> None:
    def each(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attend(q[:0], k[:0], v[:0]), attend(q[:, :, :0], k, v)]

    model = Of(lambda m, *args: each(*args))
    compiled = compile_at("O2", model)
    hold(compiled, model, *qkv(2, 5, 6, 16))
    assert_ran_as_planned(compiled, "O2")
