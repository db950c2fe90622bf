"""Every public function inside of a compiled function: on a CPU without the interpreter it becomes
torch's own operators in one graph, with sizes that change as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import triton_kernels
from tests.support.triton_calls import CALLS
from triton_kernels.availability import interpreting
from triton_kernels.errors import KernelArgumentError

pytestmark = pytest.mark.plain


def test_every_public_function_is_called_here() -> None:
    assert set(CALLS) == set(triton_kernels.__all__)


@pytest.mark.skipif(interpreting(), reason="interpreted kernels are no part of a graph")
@pytest.mark.parametrize("name", CALLS)
def test_in_one_graph(name: str) -> None:
    function = getattr(triton_kernels, name)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    _, spec = pytree.tree_flatten(CALLS[name](6))
    fixed = [leaf for leaf in pytree.tree_leaves(CALLS[name](6)) if not is_tensor(leaf)]

    def call(tensors: list[torch.Tensor]) -> Any:
        numbers, given = iter(fixed), iter(tensors)
        leaves = [next(given if holds else numbers) for holds in holds_tensor]
        return function(*pytree.tree_unflatten(leaves, spec))

    holds_tensor = [is_tensor(leaf) for leaf in pytree.tree_leaves(CALLS[name](6))]
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for rows in (6, 11, 13):
        torch.manual_seed(rows)
        tensors = [leaf for leaf in pytree.tree_leaves(CALLS[name](rows)) if is_tensor(leaf)]
        torch.testing.assert_close(compiled(tensors), call(tensors))
    assert len(graphs) <= 2


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "attention", "matmul", "softmax", "rope"])
def test_tensors_apart_are_told(name: str) -> None:
    first, *others = CALLS[name](4)
    if name == "softmax":
        others = [-1]
    moved = [x.to("meta") if is_tensor(x) else x for x in others]
    more = {"mask": torch.ones(4, 32, device="meta")} if name == "softmax" else {}
    with pytest.raises(KernelArgumentError, match=r"one device, not on [\w:]+ and [\w:]+"):
        getattr(triton_kernels, name)(first, *moved, **more)


@pytest.mark.skipif(interpreting(), reason="interpreted kernels are no part of a graph")
def test_tokens_whose_number_only_the_data_tell() -> None:
    """As those that a mask leaves: nothing may be decided by their number while it is traced."""

    def loss(*given: torch.Tensor) -> torch.Tensor:
        hidden, weight, target, kept = given
        some = kept.nonzero().squeeze(1)
        return triton_kernels.linear_cross_entropy(hidden[some], weight, target[some], chunk=4)

    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (10, 20))
    target, kept = torch.randint(20, (10,)), torch.arange(10) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        got = compiled(hidden, weight, target, kept)
    own = loss(hidden, weight, target, kept)
    assert torch.equal(got, own)
    for of_got, of_own in zip(
        torch.autograd.grad(got, (hidden, weight)),
        torch.autograd.grad(own, (hidden, weight)),
        strict=True,
    ):
        assert torch.equal(of_got, of_own)
