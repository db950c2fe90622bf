"""The matcher of einsums: labels, costs of orders, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from lowering.regions import einsum

pytestmark = pytest.mark.quick


def graph(equation: Any, *shapes: tuple[int, ...], listed: bool = False, **kwargs: Any) -> fx.Graph:
    """One einsum node over inputs of these shapes, as Dynamo writes it."""
    made = fx.Graph()
    dtype = kwargs.pop("dtype", torch.float32)
    mode = FakeTensorMode()
    nodes, values = [], []
    for index, shape in enumerate(shapes):
        node = made.placeholder(f"x{index}")
        node.meta["example_value"] = mode.from_tensor(torch.empty(shape, dtype=dtype))
        nodes.append(node)
        values.append(node.meta["example_value"])
    args = (equation, nodes) if listed else (equation, *nodes)
    result = made.call_function(torch.functional.einsum, args, kwargs)
    with mode:
        result.meta["example_value"] = torch.einsum(equation, *values)
    made.output(result)
    return made


def the_match(*args: Any, **kwargs: Any) -> einsum.Einsum:
    (match,) = einsum.find(graph(*args, **kwargs))
    return match


CHAIN = ("ij,jk,kl->il", (64, 8), (8, 64), (64, 2))


@pytest.mark.parametrize("listed", [False, True])
def test_a_chain(listed: bool) -> None:
    match = the_match(*CHAIN, listed=listed)
    assert [set(term) for term in match.terms] == [{"i", "j"}, {"j", "k"}, {"k", "l"}]
    assert match.cost(match.unordered) == (2 * 64 * 8 * 64 + 2 * 64 * 64 * 2, 64 * 64)
    assert match.cost([(1, 2), (0, 1)]) == (2 * 8 * 64 * 2 + 2 * 64 * 8 * 2, 64 * 2)
    work = match.work()
    assert (work.region, work.dtypes, work.flops) == ("einsum", {"float32"}, 81920)


def test_a_label_of_one_operand_is_summed_before_the_product() -> None:
    match = the_match("ijz,jk,kl->il", (4, 5, 100), (5, 6), (6, 7))
    assert match.cost([(0, 1), (0, 1)])[0] == 2 * 4 * 5 * 6 + 2 * 4 * 6 * 7


def test_an_outer_product_only_multiplies() -> None:
    match = the_match("a,b,c->abc", (4,), (5,), (6,))
    assert match.cost([(0, 1), (0, 1)]) == (4 * 5 * 6 + 4 * 5, 120)


@pytest.mark.parametrize(
    ("equation", "dimensions", "terms", "output"),
    [
        ("ij, jk ,kl", (2, 2, 2), ["ij", "jk", "kl"], "il"),
        ("iij,jk,k->ik", (3, 2, 1), ["iij", "jk", "k"], "ik"),
        ("ba,ba,c", (2, 2, 1), ["ba", "ba", "c"], "c"),
        ("i,i,i->", (1, 1, 1), ["i", "i", "i"], ""),
    ],
)
def test_labels(equation: str, dimensions: Any, terms: list[str], output: str) -> None:
    assert einsum.parse(equation, dimensions) == ([list(t) for t in terms], list(output))


def test_labels_of_an_ellipsis_count_from_the_right() -> None:
    terms, output = einsum.parse("...ij,jk,b...kl->b...il", (4, 2, 5)) or ([], [])
    assert terms == [[-2, -1, "i", "j"], ["j", "k"], ["b", -2, -1, "k", "l"]]
    assert output == ["b", -2, -1, "i", "l"]
    assert einsum.parse("...i,i,i", (3, 1, 1)) == ([[-2, -1, "i"], ["i"], ["i"]], [-2, -1])


@pytest.mark.parametrize(
    ("equation", "dimensions"),
    [
        ("ij,jk->ik", (2, 2, 2)),  # too few terms
        ("ij,jk,kl->il", (2, 3, 2)),  # a dimension without a label
        ("ij,jk,kl->iz", (2, 2, 2)),
        ("ij,jk,kl->ii", (2, 2, 2)),
        ("i1,jk,kl->il", (2, 2, 2)),
        ("...ij,jk,kl->il", (3, 2, 2)),  # torch sums the ellipsis
    ],
)
def test_equations_that_are_not_understood(equation: str, dimensions: Any) -> None:
    assert einsum.parse(equation, dimensions) is None


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", ((4, 5), (5, 6))),  # nothing to order
        ("ij,jk,kl->il", ((4, 1), (5, 6), (6, 7))),  # broadcast
        ("...i,...i,i->...", ((3, 4), (1, 4), (4,))),
    ],
)
def test_left_alone(equation: str, shapes: Any) -> None:
    assert list(einsum.find(graph(equation, *shapes))) == []


def test_lists_of_numbers_are_left_alone() -> None:
    made = graph(*CHAIN)
    (node,) = made.find_nodes(op="call_function", target=torch.functional.einsum)
    a, b, c = node.args[1:]
    node.args = (a, [0, 1], b, [1, 2], c, [2, 3], [0, 3])
    assert list(einsum.find(made)) == []


def test_one_dtype_in_and_another_out_is_left_alone() -> None:
    """Under autocast, einsum computes in another dtype than its operands have."""
    made = graph(*CHAIN)
    (node,) = made.find_nodes(op="call_function", target=torch.functional.einsum)
    node.meta["example_value"] = node.meta["example_value"].bfloat16()
    assert list(einsum.find(made)) == []


def test_unknown_values_are_left_alone() -> None:
    made = graph(*CHAIN)
    next(iter(made.nodes)).meta.clear()
    assert list(einsum.find(made)) == []
