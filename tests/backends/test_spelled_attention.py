"""Attention that a model spells out is found, whatever its steps; what is something else, stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from lowering import spelled_attention
from lowering.regions.calls import name_of
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of
from tests.support.regions import hold, region_rows
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor
HEADS, QUERIES, KEYS, SIZE = 3, 9, 14, 8
LEAST = torch.finfo(torch.float32).min


def q(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, HEADS, QUERIES, SIZE)))


def kv(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, HEADS, KEYS, SIZE)))


def added(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, 1, QUERIES, KEYS)))


def hides() -> Tensor:
    hidden = torch.rand(2, 1, QUERIES, KEYS) < 0.4
    hidden[..., 0] = False
    return hidden


def transformers_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5
    weights = weights + mask[:, :, :, : k.shape[-2]]
    weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = functional.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = q @ k.mT
    weights *= 0.3
    weights += mask
    return weights.softmax(-1) @ v


def shifted_windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """As Swin v2: cosines with a factor for each head, a bias for each head, windows hidden."""
    weights = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
    weights = weights * factor + mask[0]
    weights = weights.view(2, 2, HEADS, QUERIES, KEYS) + mask[:, 0][None, :, None]
    weights = weights.view(-1, HEADS, QUERIES, KEYS)
    return functional.softmax(weights, -1) @ v


def heads_merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in older decoders: products of three dimensions, the mask added to four."""
    weights = torch.bmm(q.flatten(0, 1) * 0.35, k.flatten(0, 1).transpose(1, 2))
    weights = weights.view(2, HEADS, QUERIES, KEYS) + mask
    weights = weights.view(2 * HEADS, QUERIES, KEYS)
    return torch.bmm(functional.softmax(weights, dim=2), v.flatten(0, 1)).view(2, HEADS, -1, SIZE)


def rows_and_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As MViT v2: what is added depends on the key's row or column alone."""
    weights = (q * 0.35) @ k.transpose(2, 3)
    apart = weights.view(2, HEADS, 3, 3, 2, 7)
    apart = apart + mask[0, 0, :3, None, None, :2, None] + mask[0, 0, None, :3, None, None, :7]
    return apart.view(2, HEADS, QUERIES, KEYS).softmax(-1) @ v


def as_layers_lay_it(x: Tensor, weights: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    heads = x.view(2, QUERIES, HEADS, SIZE).transpose(1, 2)
    return weights(heads, heads.mT).softmax(-1) @ heads


def tokens() -> Tensor:
    return torch.randn(2, QUERIES, HEADS * SIZE)


def query_written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q + 0
    weights = q @ k.mT
    q.zero_()
    return weights.softmax(-1) @ v + q


def activation_in_place_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v + 0
    weights = q @ k.mT
    functional.relu(v, True)
    return weights.softmax(-1) @ v


Case = tuple[Callable[..., Tensor], tuple[Callable[[], Tensor], ...]]
QKV = (q, kv, kv)
FOUND: dict[str, Case] = {
    "transformers": (transformers_eager, (*QKV, added)),
    "nothing but products": (lambda q, k, v: torch.softmax(q @ k.mT, dim=3) @ v, QKV),
    "divided": (lambda q, k, v: ((q @ k.mT) / math.sqrt(SIZE)).softmax(dim=-1).matmul(v), QKV),
    "number first": (lambda q, k, v: (0.5 * torch.matmul(q, k.mT)).softmax(-1) @ v, QKV),
    "scaled before": (lambda q, k, v: ((q / 3) @ (k * 0.7).mT).softmax(-1) @ v, QKV),
    "in place": (in_place, (*QKV, added)),
    "mask first": (lambda q, k, v, m: (m + q @ k.mT * 0.4).softmax(-1) @ v, (*QKV, added)),
    "two masks": (
        lambda q, k, v, m, n: (q @ k.mT / 3 + m + n).softmax(-1) @ v,
        (*QKV, added, lambda: added(HEADS, QUERIES, 1)),
    ),
    "nothing added": (lambda q, k, v: (q @ k.mT + 0).softmax(-1) @ v, QKV),
    "hidden": (
        lambda q, k, v, m: (q @ k.mT).masked_fill(m, -math.inf).softmax(-1) @ v,
        (*QKV, hides),
    ),
    "kept": (
        lambda q, k, v, m: torch.where(~m, q @ k.mT * 0.2, LEAST).softmax(-1) @ v,
        (*QKV, hides),
    ),
    "hidden and added": (
        lambda q, k, v, m, n: ((q @ k.mT) + n).masked_fill_(m, LEAST).softmax(-1) @ v,
        (*QKV, hides, added),
    ),
    "added and hidden, in every order": (
        lambda q, k, v, m, n: (
            ((q @ k.mT).masked_fill(m, LEAST) + n).masked_fill(~m, -math.inf).softmax(-1) @ v
        ),
        (*QKV, hides, added),
    ),
    "three dimensions": (
        lambda q, k, v, m: torch.bmm((torch.bmm(q, k.mT) + m).softmax(2), v),
        (lambda: q(4, 6, 8), lambda: kv(4, 7, 8), lambda: kv(4, 7, 8), lambda: added(6, 7)),
    ),
    "numbers apart in memory": (
        lambda q, k, v: (q.mT @ k).softmax(-1) @ v.mT,
        (lambda: q(2, 3, 8, 9), lambda: kv(2, 3, 8, 14), lambda: kv(2, 3, 8, 14)),
    ),
    "a factor for each head": (
        lambda q, k, v, f: (q @ k.mT * f.exp()).softmax(-1) @ v,
        (*QKV, lambda: added(HEADS, 1, 1)),
    ),
    "a temperature": (
        lambda q, k, v, t, m: (q @ k.mT * t.exp()).masked_fill(m, LEAST).softmax(-1) @ v,
        (*QKV, lambda: torch.randn(()), hides),
    ),
    "a temperature in a list": (
        lambda q, k, v, t: (t * (q @ k.mT)).softmax(-1) @ v,
        (*QKV, lambda: torch.rand(1)),
    ),
    "a root as a tensor": (
        lambda q, k, v: ((q @ k.mT) / torch.sqrt(torch.tensor(SIZE))).softmax(-1) @ v,
        QKV,
    ),
    "a root in float64": (
        lambda q, k, v, t: ((q @ k.mT) / t).softmax(-1) @ v,
        (*QKV, lambda: torch.tensor(3.0, dtype=torch.float64)),
    ),
    "a temperature, heads merged": (
        lambda q, k, v, t: (
            ((q @ k.mT) / t).view(-1, QUERIES, KEYS).softmax(-1).view(2, HEADS, QUERIES, KEYS) @ v
        ),
        (*QKV, lambda: torch.tensor(3.0)),
    ),
    "divided by a factor for each head": (
        lambda q, k, v, f: (q @ k.mT / f.exp()).softmax(-1) @ v,
        (*QKV, lambda: added(HEADS, 1, 1)),
    ),
    "shifted windows": (
        shifted_windows,
        (
            lambda: q(4, HEADS, QUERIES, SIZE),
            lambda: kv(4, HEADS, KEYS, SIZE),
            lambda: kv(4, HEADS, KEYS, SIZE),
            lambda: added(2, HEADS, QUERIES, KEYS),
            lambda: added(HEADS, 1, 1),
        ),
    ),
    "heads merged": (heads_merged, (*QKV, added)),
    "rows and columns": (rows_and_columns, (*QKV, added)),
    "by keyword": (lambda q, k, v: functional.softmax(input=q @ k.mT, dim=-1) @ v, QKV),
    "result viewed": (lambda x: as_layers_lay_it(x, torch.matmul).view(2, -1, SIZE), (tokens,)),
    "result read as it lies": (
        lambda x: as_layers_lay_it(x, torch.matmul).as_strided((4, 8), (8, 1)),
        (tokens,),
    ),
    "result in a layer's order": (
        lambda x: as_layers_lay_it(x, torch.matmul).transpose(1, 2).reshape(2, QUERIES, -1),
        (tokens,),
    ),
    "wide values": (
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        (q, kv, lambda: kv(2, HEADS, KEYS, SIZE + 4)),
    ),
    "narrow values": (
        lambda q, k, v, m: ((q @ k.mT) * 0.2 + m).softmax(-1) @ v[..., 1:4],
        (*QKV, added),
    ),
    "wide values, heads merged": (
        lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).sum(0),
        (lambda: q(4, 9, 8), lambda: kv(4, 14, 8), lambda: kv(4, 14, 20)),
    ),
    "one head of keys": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (q, lambda: kv(2, 1, KEYS, SIZE), lambda: kv(2, 1, KEYS, SIZE), added),
    ),
    "one head of keys, of fewer dimensions": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (q, lambda: kv(KEYS, SIZE), lambda: kv(KEYS, SIZE), lambda: added(HEADS, 1, KEYS)),
    ),
    "keys of one text, a factor for each head": (
        lambda q, k, v, f: (q @ k.mT * f).softmax(-1) @ v,
        (q, *[lambda: kv(1, HEADS, KEYS, SIZE)] * 2, lambda: added(HEADS, 1, 1)),
    ),
    "values shared more widely than keys": (
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        (lambda: q(HEADS, QUERIES, SIZE), lambda: kv(KEYS, SIZE), kv),
    ),
    "two dimensions": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (lambda: q(9, 8), lambda: kv(14, 8), lambda: kv(14, 8), lambda: added(14)),
    ),
    "five dimensions": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (
            lambda: q(2, 3, 2, 9, 8),
            lambda: kv(1, 3, 2, 14, 8),
            lambda: kv(2, 3, 1, 14, 8),
            lambda: added(2, 9, 14),
        ),
    ),
    "five dimensions, a mask for each": (
        lambda q, k, v, m: (q @ k.mT).masked_fill(m < 0, LEAST).softmax(-1) @ v,
        (
            lambda: q(2, 3, 2, 9, 8),
            *[lambda: kv(2, 3, 2, 14, 8)] * 2,
            lambda: added(2, 3, 1, 9, 14),
        ),
    ),
    "the greatest taken away": (
        lambda q, k, v, m: [
            s := (q @ k.mT) * 0.3 + m,
            (s - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v,
        ][1],
        (*QKV, added),
    ),
    "the greatest taken away in another way": (
        lambda q, k, v: [
            s := torch.einsum("bhid,bhjd->bhij", q, k),
            (s - s.max(dim=3, keepdim=True)[0]).softmax(-1) @ v,
        ][1],
        QKV,
    ),
    "einsums": (
        lambda q, k, v, m: torch.einsum(
            "b h i j, b h j d -> b h i d",
            (torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3 + m).softmax(-1),
            v,
        ),
        (*QKV, added),
    ),
    "einsums of three": (
        lambda q, k, v: torch.einsum(
            "bij,bjd->bid", torch.einsum("bid,bjd->bij", q * 0.4, k).softmax(2), v
        ),
        (lambda: q(4, 9, 8), lambda: kv(4, 14, 8), lambda: kv(4, 14, 8)),
    ),
    "einsums with the heads behind": (
        lambda q, k, v: torch.einsum(
            "...khd,...hqk->...qhd", v, torch.einsum("...khd,...qhd->...hqk", k, q).softmax(-1)
        ),
        (lambda: q(2, 9, 3, 8), lambda: kv(2, 14, 3, 8), lambda: kv(2, 14, 3, 8)),
    ),
    "an einsum and a product": (
        lambda q, k, v: torch.einsum("nhqd,nhkd->nhqk", [q, k]).softmax(-1) @ v,
        QKV,
    ),
    "one query": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (lambda: q(2, 3, 1, 8), kv, kv, lambda: added(2, 1, 1, KEYS)),
    ),
}

LEFT: dict[str, Case] = {
    "weights are given back": (
        lambda q, k, v: [w := (q @ k.mT).softmax(-1), w @ v][1] + w.sum(),
        QKV,
    ),
    "scores are used": (lambda q, k, v: [s := q @ k.mT, s.softmax(-1) @ v][1] + s.mean(), QKV),
    "dropped": (lambda q, k, v: functional.dropout((q @ k.mT).softmax(-1), 0.0001, True) @ v, QKV),
    "something else taken away": (
        lambda q, k, v, m: (q @ k.mT - m).softmax(-1) @ v,
        (*QKV, added),
    ),
    "the greatest of another row taken away": (
        lambda q, k, v: [s := q @ k.mT, (s - s.amax(-2, keepdim=True)).softmax(-1) @ v][1],
        QKV,
    ),
    "where the greatest is": (
        lambda q, k, v: [s := q @ k.mT, (s - s.max(-1, keepdim=True)[1]).softmax(-1) @ v][1],
        QKV,
    ),
    "the greatest is used": (
        lambda q, k, v: [
            s := q @ k.mT,
            g := s.amax(-1, keepdim=True),
            (s - g).softmax(-1) @ v + g,
        ][2],
        QKV,
    ),
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, QKV),
    "scaled after a mask": (lambda q, k, v, m: ((q @ k.mT + m) * 2).softmax(-1) @ v, (*QKV, added)),
    "hidden a little": (
        lambda q, k, v, m: (q @ k.mT).masked_fill(m, -5.0).softmax(-1) @ v,
        (*QKV, hides),
    ),
    "a temperature after a mask": (
        lambda q, k, v, m, t: ((q @ k.mT + m) / t).softmax(-1) @ v,
        (*QKV, added, lambda: torch.tensor(3.0)),
    ),
    "a temperature that widens": (
        lambda q, k, v, t: ((q @ k.mT) / t).softmax(-1).float() @ v,
        (*QKV, lambda: torch.ones(1, dtype=torch.float64)),
    ),
    "divided by itself": (
        lambda q, k, v: [s := q @ k.mT, (s / s.max()).softmax(-1) @ v][1],
        QKV,
    ),
    "whole parts": (
        lambda q, k, v: (
            torch.div(q @ k.mT, torch.tensor(2.0), rounding_mode="floor").softmax(-1) @ v
        ),
        QKV,
    ),
    "a factor for each pair": (lambda q, k, v, m: (q @ k.mT * m).softmax(-1) @ v, (*QKV, added)),
    "six dimensions of which a mask shares some": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v,
        (
            lambda: q(2, 3, 2, 9, 8),
            lambda: kv(2, 3, 2, 14, 8),
            lambda: kv(2, 3, 2, 14, 8),
            lambda: added(3, 1, 9, 14),
        ),
    ),
    "an einsum over two labels": (
        lambda q, k, v: torch.einsum(
            "bij,bjhd->bihd", torch.einsum("bihd,bjhd->bij", q, k).softmax(-1), v
        ),
        (lambda: q(2, 9, 3, 8), lambda: kv(2, 14, 3, 8), lambda: kv(2, 14, 3, 8)),
    ),
    "einsums whose weights are used": (
        lambda q, k, v: (
            [
                w := torch.einsum("bid,bjd->bij", q, k).softmax(-1),
                torch.einsum("bij,bjd->bid", w, v),
            ][1]
            + w.sum()
        ),
        (lambda: q(4, 9, 8), lambda: kv(4, 14, 8), lambda: kv(4, 14, 8)),
    ),
    "query written between": (query_written_between, QKV),
    "values written between": (activation_in_place_between, QKV),
    "product by keyword": (lambda q, k, v: torch.matmul((q @ k.mT).softmax(-1), other=v), QKV),
    "capped": (lambda q, k, v: (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v, QKV),
    "in float64": (lambda q, k, v: (q.double() @ k.double().mT).softmax(-1) @ v.double(), QKV),
    "weights on the right": (lambda q, k, v: v.mT @ (k @ q.mT).softmax(-1), QKV),
}


def joined(case: Case) -> int:
    """How many were found, with the numbers compared."""
    function, make = case
    inputs = [one() for one in make]
    found: list[int] = []

    def joining(module: fx.GraphModule, example_inputs: Any) -> Any:
        before = sum(name_of(node) == "einsum" for node in module.graph.nodes)
        found.append(spelled_attention.join(module.graph))
        module.graph.lint()
        module.recompile()
        einsums = sum(name_of(node) == "einsum" for node in module.graph.nodes)
        assert einsums == (0 if found[-1] else before)
        softmaxes = [node for node in module.graph.nodes if name_of(node) == "softmax"]
        assert len(softmaxes) == 1 - found[-1]
        return module.forward

    compiled = torch.compile(function, backend=joining, fullgraph=True)
    with torch.no_grad():
        got = compiled(*[x.clone() for x in inputs])
        torch.testing.assert_close(got, function(*[x.clone() for x in inputs]))
    (count,) = found
    return count


@pytest.mark.quick
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    assert joined(FOUND[name]) == 1


@pytest.mark.quick
@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    assert joined(LEFT[name]) == 0


def taken(compiled: Any) -> list[tuple[str, int, int]]:
    return [row[1:] for row in region_rows(compiled) if row[0] == "attention"]


def test_our_kernel_computes_what_was_found() -> None:
    names = [name for name in FOUND if name != "one query"]
    cases = [FOUND[name] for name in names]
    inputs = [[one() for one in make] for _, make in cases]
    ends = [sum(map(len, inputs[:i])) for i in range(len(inputs) + 1)]

    def every(m: Any, *given: Tensor) -> list[Tensor]:
        return [cases[i][0](*given[ends[i] : ends[i + 1]]) for i in range(len(cases))]

    model = Of(every)
    with every_row_applies():
        compiled = compile_at("O2", model)
        hold(compiled, model, *(tensor for one in inputs for tensor in one))
    assert taken(compiled) == [("mha", len(names), len(names))]
    assert_ran_as_planned(compiled, "O2")


MASKS_OF_MERGED_HEADS = {
    "each head": (2 * HEADS, QUERIES, KEYS),
    "all heads": (1, QUERIES, KEYS),
    "each head's keys": (2 * HEADS, 1, KEYS),
    "keys": (KEYS,),
}


@pytest.mark.parametrize("mask", MASKS_OF_MERGED_HEADS)
def test_heads_merged_with_the_batch(mask: str) -> None:
    """One operator, and no copy of its result: it lies as eager's product does."""
    model = Of(lambda self, q, k, v, m: torch.bmm((torch.bmm(q, k.mT) + m).softmax(-1), v))
    given = (q(2 * HEADS, QUERIES, SIZE), kv(2 * HEADS, KEYS, SIZE), kv(2 * HEADS, KEYS, SIZE))
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", model)
        operands = (*given, added(*MASKS_OF_MERGED_HEADS[mask]))
        (code,) = run_and_get_code(compiled, *operands)[1]
        hold(compiled, model, *operands)
    assert taken(compiled) == [("mha", 1, 2)]

    assert "cpp_fused" not in code.split("mha_attention.default(")[1].split("return (")[0]


def test_a_row_with_every_key_hidden_is_not_a_number() -> None:
    function, make = FOUND["transformers"]
    given = [one() for one in make]
    given[-1][1, 0, 4] = -math.inf
    given[-1][0, 0, 2, 3:] = -math.inf
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", function)
        got, own = compiled(*given), function(*given)
    assert own[1, 4].isnan().all() and not own[0].isnan().any()
    torch.testing.assert_close(got, own, equal_nan=True)
    assert taken(compiled) == [("mha", 1, 1)]


def test_a_row_hidden_twice_is_the_mean_of_the_values() -> None:
    """The smallest number takes the score's place, so all keys are alike; added twice it would be
    minus infinity."""

    def padded(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, causal: Tensor) -> Tensor:
        return (q @ k.mT + causal).masked_fill(hidden, LEAST).softmax(-1) @ v

    hidden = hides()
    hidden[1, 0, :3] = True
    causal = torch.full((QUERIES, KEYS), LEAST).triu(1)
    given = (q(), kv(), kv(), hidden, causal)
    with every_row_applies():
        compiled = compile_at("O2", padded)
        with torch.no_grad():
            got = compiled(*given)
    torch.testing.assert_close(got, padded(*given))
    torch.testing.assert_close(got[1, :, 0], given[2][1].mean(1))
    assert taken(compiled) == [("mha", 1, 1)]


def test_without_our_kernel_the_steps_stay() -> None:
    function, make = FOUND["transformers"]
    given = [one() for one in make]
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", function, options={"disable": ["mha"]})
        torch.testing.assert_close(compiled(*given), function(*given))
    assert taken(compiled) == []
    assert_ran_as_planned(compiled, "O2")


def test_sizes_that_change() -> None:
    function, _ = FOUND["transformers"]
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", function)
        for keys in (11, 30):
            given = (q(), kv(2, HEADS, keys, SIZE), kv(2, HEADS, keys, SIZE))
            mask = added(2, 1, QUERIES, keys)
            for tensor, dim in ((given[1], 2), (given[2], 2), (mask, 3)):
                torch._dynamo.mark_dynamic(tensor, dim)
            torch.testing.assert_close(compiled(*given, mask), function(*given, mask))
    assert sum(rows[2] for rows in taken(compiled)) == 2


def test_a_bias_that_is_a_parameter() -> None:
    def attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + m.bias.weight.view(1, 1, QUERIES, KEYS)).softmax(-1) @ v

    model = Of(attention, bias=nn.Embedding(QUERIES, KEYS))
    with every_row_applies():
        compiled = compile_at("O2", model)
        hold(compiled, model, q(), kv(), kv())
    assert taken(compiled) == [("mha", 1, 1)]


def test_training_keeps_the_users_own_steps() -> None:
    function, make = FOUND["nothing but products"]
    given = [one().requires_grad_() for one in make]
    with every_row_applies():
        compiled = compile_at("O2", function)
        compiled(*given).square().sum().backward()
    found = [x.grad for x in given]
    for x in given:
        x.grad = None
    function(*given).square().sum().backward()
    torch.testing.assert_close(found, [x.grad for x in given])
    assert_ran_as_planned(compiled, "O2")
