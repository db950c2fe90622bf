"""Calls of torch's attention in other than four dimensions, and with sizes that are broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from lowering import attention_in_four
from lowering.regions.calls import name_of, value_of
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of
from tests.support.regions import assert_regions, hold
from tests.support.reports import assert_ran_as_planned

Tensor = torch.Tensor
attend = functional.scaled_dot_product_attention
QUERIES, KEYS, SIZE = 9, 14, 8


def qkv(query: tuple[int, ...], key: tuple[int, ...] | None = None) -> list[Tensor]:
    key = query if key is None else key
    keys = [torch.randn(*key, KEYS, SIZE) for _ in range(2)]
    return [torch.randn(*query, QUERIES, SIZE), *keys]


def truth(*sizes: int) -> Tensor:
    mask = torch.rand(*sizes) < 0.6
    mask[..., 0] = True
    return mask


Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]
CHANGED: dict[str, Case] = {
    "two dimensions": (attend, lambda: qkv(())),
    "two dimensions with a mask": (attend, lambda: [*qkv(()), torch.randn(KEYS)]),
    "three dimensions": (attend, lambda: qkv((6,))),
    "three dimensions, causal": (
        lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.2),
        lambda: qkv((6,)),
    ),
    "three dimensions, a mask for all": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m),
        lambda: [*qkv((6,)), truth(QUERIES, KEYS)],
    ),
    "three dimensions, a mask for each": (
        attend,
        lambda: [*qkv((6,)), torch.randn(6, QUERIES, KEYS)],
    ),
    "three dimensions, transposed": (
        lambda q, k, v: attend(q.mT, k, v),
        lambda: [torch.randn(6, SIZE, QUERIES), *qkv((6,))[1:]],
    ),
    "numbers apart in memory": (
        lambda q, k, v: attend(q, k.mT, v),
        lambda: [*qkv((2, 3))[:1], torch.randn(2, 3, SIZE, KEYS), *qkv((2, 3))[1:2]],
    ),
    "one head of keys": (attend, lambda: qkv((2, 6), (2, 1))),
    "one head of keys with a mask": (
        attend,
        lambda: [*qkv((2, 6), (2, 1)), truth(2, 1, QUERIES, KEYS)],
    ),
    "one head of keys, in a layer's order": (
        lambda q, k, v: attend(q, k, v).transpose(1, 2).reshape(2, QUERIES, -1),
        lambda: qkv((2, 6), (2, 1)),
    ),
    "keys of one text": (attend, lambda: qkv((4, 3), (1, 3))),
    "queries of one text": (attend, lambda: qkv((1, 3), (4, 3))),
    "keys of fewer dimensions": (attend, lambda: qkv((4, 3), ())),
    "wide values of one text": (
        attend,
        lambda: [*qkv((4, 3))[:2], torch.randn(1, 3, KEYS, SIZE + 8)],
    ),
    "a mask of three dimensions": (
        attend,
        lambda: [*qkv((2, 6)), torch.randn(6, QUERIES, KEYS)],
    ),
    "five dimensions": (attend, lambda: qkv((2, 3, 4))),
    "five dimensions, a mask for each": (
        attend,
        lambda: [*qkv((2, 3, 4)), torch.randn(2, 3, 1, QUERIES, KEYS)],
    ),
    "six dimensions, keys shared, a mask for heads": (
        attend,
        lambda: [*qkv((2, 2, 3, 4), (2, 1, 1, 1)), torch.randn(4, QUERIES, KEYS)],
    ),
}
LEFT: dict[str, Case] = {
    "four dimensions": (attend, lambda: qkv((2, 3))),
    "four dimensions with a mask": (attend, lambda: [*qkv((2, 3)), truth(2, 1, QUERIES, KEYS)]),
    "grouped heads": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        lambda: qkv((2, 6), (2, 1)),
    ),
    "five dimensions of which a mask shares some": (
        attend,
        lambda: [*qkv((2, 3, 4)), torch.randn(2, 1, 4, QUERIES, KEYS)],
    ),
}


def changed(case: Case) -> int:
    """How many calls were, with the numbers and the layout compared."""
    function, make = case
    inputs = make()
    found: list[int] = []

    def writing(module: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(attention_in_four.write(module.graph))
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            if found[-1] and name_of(node) == "scaled_dot_product_attention":
                leading = {value_of(operand).shape[:-2] for operand in node.args[:3]}
                assert len(leading) == 1
                assert len(leading.pop()) == 2
        return module.forward

    with torch.no_grad():
        got = torch.compile(function, backend=writing, fullgraph=True)(*inputs)
        wanted = function(*inputs)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    (count,) = found
    return count


@pytest.mark.quick
@pytest.mark.parametrize("name", CHANGED)
def test_changed(name: str) -> None:
    assert changed(CHANGED[name]) == 1


@pytest.mark.quick
@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    assert changed(LEFT[name]) == 0


@pytest.mark.quick
def test_dropout_draws_as_before() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=0.5)

    found: list[int] = []

    def writing(module: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(attention_in_four.write(module.graph))
        return module.forward

    torch.compile(dropped, backend=writing, fullgraph=True)(*qkv((6,)))
    assert found == [0]


def test_our_kernel_computes_them() -> None:
    inputs = [make() for _, make in CHANGED.values()]

    def all_of_them(model: Any, *given: Tensor) -> list[Tensor]:
        tensors = iter(given)
        return [
            call(*[next(tensors) for _ in one])
            for (call, _), one in zip(CHANGED.values(), inputs, strict=True)
        ]

    model = Of(all_of_them)
    with every_row_applies():
        compiled = compile_at("O2", model)
        hold(compiled, model, *[tensor for one in inputs for tensor in one])
    assert_regions(compiled, ("attention", "mha", len(CHANGED), len(CHANGED)))


@pytest.mark.parametrize("shape", [(0, QUERIES), (6, 0)], ids=str)
def test_nothing_at_all(shape: tuple[int, int]) -> None:
    texts, queries = shape
    compiled = compile_at("O2", attend)
    keys = torch.randn(texts, KEYS, SIZE)
    with torch.no_grad(), every_row_applies():
        assert compiled(torch.randn(texts, queries, SIZE), keys, keys).shape == (*shape, SIZE)


def test_under_vmap_it_stays() -> None:
    model = Of(lambda m, q, k, v: torch.vmap(attend, in_dims=(0, None, None))(q, k, v))
    with every_row_applies():
        compiled = compile_at("O2", model)
        hold(compiled, model, *qkv((4, 6), (6,)))
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("function", ["call", "products", "einsums"])
def test_under_autocast(function: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
        return torch.einsum("bij,bjd->bid", weights, v)

    def under_autocast(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {"call": call, "products": products, "einsums": einsums}[function](*given)

    given = qkv((6,))
    with every_row_applies(), torch.no_grad():
        compiled = compile_at("O2", under_autocast)
        got, wanted = compiled(*given), under_autocast(*given)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, atol=0.03, rtol=0.03)
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision(dtype: torch.dtype) -> None:
    model = Of(lambda m, q, k, v: attend(q, k, v))
    with every_row_applies():
        compiled = compile_at("O2", model)
        hold(compiled, model, *[tensor.to(dtype) for tensor in qkv((2, 6), (2, 1))])
    assert_regions(compiled, ("attention", "mha", 1, 1))


@pytest.mark.parametrize("heads", [(), (1, 1, 1), (6, 1, 1)], ids=str)
def test_lengths_and_texts_that_change(heads: tuple[int, ...]) -> None:
    model = Of(lambda m, q, k, v: attend(q, k, v))
    with every_row_applies():
        compiled = compile_at("O2", model)
        for texts, length in ((3, 19), (5, 40), (4, 33)):
            each = [(number,) for number in heads] or [()] * 3
            tensors = [torch.randn(texts, *one, length, SIZE) for one in each]
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2)
            hold(compiled, model, *tensors, where=f"{texts} x {length}")
    assert_regions(compiled, ("attention", "mha", 1, 3))
