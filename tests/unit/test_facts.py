"""Graph facts, on graphs that Dynamo captured and nobody compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernel_dispatch.facts import GraphFacts, collect

pytestmark = pytest.mark.quick


def captured(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[GraphFacts]:
    """The facts of every graph that Dynamo makes of one call."""
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(collect(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, **kwargs)(*args)
    return found


def facts_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphFacts:
    (facts,) = captured(fn, *args, **kwargs)
    return facts


def tensor(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, **kwargs)


FLOPS = {
    "linear": (F.linear, (tensor(2, 5, 7), tensor(3, 7)), 2 * 2 * 5 * 3 * 7),
    "linear_bias": (F.linear, (tensor(5, 7), tensor(3, 7), tensor(3)), 2 * 5 * 3 * 7),
    "module": (nn.Linear(7, 3), (tensor(5, 7),), 2 * 5 * 3 * 7),
    "matmul": (torch.matmul, (tensor(4, 5, 6), tensor(4, 6, 7)), 2 * 4 * 5 * 6 * 7),
    "operator": (lambda a, b: a @ b, (tensor(5, 6), tensor(6, 7)), 2 * 5 * 6 * 7),
    "matvec": (lambda a, b: a @ b, (tensor(5, 6), tensor(6)), 2 * 5 * 6),
    "mm": (torch.mm, (tensor(5, 6), tensor(6, 7)), 2 * 5 * 6 * 7),
    "bmm": (torch.bmm, (tensor(3, 5, 6), tensor(3, 6, 7)), 2 * 3 * 5 * 6 * 7),
    "addmm": (torch.addmm, (tensor(7), tensor(5, 6), tensor(6, 7)), 2 * 5 * 6 * 7),
    "square": (lambda a: a @ a, (tensor(6, 6),), 2 * 6**3),
    "conv2d": (
        F.conv2d,
        (tensor(2, 4, 8, 8), tensor(6, 4, 3, 3)),
        2 * (2 * 6 * 6 * 6) * (4 * 3 * 3),
    ),
    "conv2d_groups": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2),
        (tensor(1, 4, 8, 8), tensor(6, 2, 3, 3)),
        2 * (6 * 4 * 4) * (2 * 3 * 3),
    ),
    "conv1d": (F.conv1d, (tensor(2, 4, 9), tensor(5, 4, 3)), 2 * (2 * 5 * 7) * (4 * 3)),
    "conv_transpose2d": (
        F.conv_transpose2d,
        (tensor(1, 4, 5, 5), tensor(4, 3, 2, 2)),
        2 * (4 * 5 * 5) * (3 * 2 * 2),
    ),
    "sdpa": (
        F.scaled_dot_product_attention,
        (tensor(2, 3, 5, 8), tensor(2, 3, 7, 8), tensor(2, 3, 7, 4)),
        2 * 2 * 3 * 5 * 7 * (8 + 4),
    ),
    "pointwise": (torch.sin, (tensor(5, 6),), 30),
    "views": (lambda x: x.view(6, 5).t().unsqueeze(0), (tensor(5, 6),), 0),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name: str) -> None:
    fn, args, flops = FLOPS[name]
    assert facts_of(fn, *args).flops == flops


def test_ops_dtypes_bytes_and_place() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() + y).view(-1).sin()

    facts = facts_of(fn, tensor(4, 3), tensor(3).double())
    assert dict(facts.ops) == {"add": 1, "sin": 2, "view": 1}
    assert facts.op_count == 3
    assert facts.dtypes == ("float32", "float64")
    assert facts.devices == ("cpu",)
    assert facts.bytes_moved == (48 + 48) + (48 + 24 + 96) + (96 + 96)
    assert facts.bytes_at_boundary == 48 + 24 + 96
    assert facts.place == f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert not facts.random
    assert facts.as_dict()["ops"] == dict(facts.ops)


def test_rows_are_gathered_and_slices_are_not() -> None:
    """A table counts as the rows that are read of it."""
    table, rows = tensor(1000, 4), torch.tensor([3, 1, 3])
    gathered = facts_of(lambda x, i: x[i], table, rows)
    assert (gathered.op_count, gathered.bytes_moved) == (1, 2 * 3 * 16)
    assert facts_of(lambda i, x: F.embedding(i, x), rows, table).bytes_moved == 2 * 3 * 16
    sliced = facts_of(lambda x: x[2:5], table)
    assert (sliced.op_count, sliced.bytes_moved) == (0, 0)


def test_inputs_parameters_and_buffers() -> None:
    facts = facts_of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), tensor(2, 4))
    kinds = sorted(fact.kind for fact in facts.inputs)
    assert kinds == ["buffer"] * 2 + ["input"] + ["parameter"] * 4
    assert facts.parameters == 4
    assert facts.parameter_bytes == 4 * (12 + 3 + 3 + 3)
    (given,) = (fact for fact in facts.inputs if fact.kind == "input")
    assert (given.shape, given.dtype, given.requires_grad) == ((2, 4), "float32", False)


@pytest.mark.parametrize("grad", [True, False])
def test_training(grad: bool) -> None:
    model = nn.Linear(4, 3)
    with torch.set_grad_enabled(grad):
        assert facts_of(model, tensor(2, 4)).training is grad
    assert not facts_of(torch.sin, tensor(3)).training


def test_a_graph_that_forbids_gradients_itself_is_inference() -> None:
    layer = nn.Linear(4, 4)

    def forbidden(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(x)

    def half(x: torch.Tensor) -> torch.Tensor:
        return forbidden(x) + layer(x)

    assert not facts_of(forbidden, tensor(2, 4)).training
    assert facts_of(half, tensor(2, 4)).training


def test_an_output_of_which_nothing_is_known_may_want_gradients() -> None:
    graph = torch.fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["example_value"] = torch.ones(2, requires_grad=True)
    graph.output((graph.call_function(torch.sin, (weight,)),))
    module = torch.fx.GraphModule({}, graph)
    assert collect(module, ()).training


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x * 2


# positions are those of the graph, which Dynamo orders by first use
WRITES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "nothing": (lambda x: x + 1, (tensor(4),), ()),
    "own values": (lambda x: (x + 1).mul_(2), (tensor(4),), ()),
    "add_": (lambda x, y: x.mul(2) + y.add_(1), (tensor(4), tensor(4)), (1,)),
    "view": (lambda x: x[1:].mul_(2), (tensor(4),), (0,)),
    "setitem": (lambda x, y: x.__setitem__(0, y[0]), (tensor(4), tensor(4)), (0,)),
    "iadd": (lambda x, y: x.__iadd__(y), (tensor(4), tensor(4)), (0,)),
    "augmented assignment": (added, (tensor(4), tensor(4)), (0,)),
    # The sum settles the order of the inputs: torch 2.8 meets `out` before the arguments.
    "out": (lambda x, y: (x + y, torch.sin(x, out=y)), (tensor(4), tensor(4)), (1,)),
    "inplace": (lambda x: F.relu(x, inplace=True), (tensor(4),), (0,)),
    "index_copy": (
        lambda c, i, n: c.index_copy_(0, i, n),
        (tensor(4, 2), torch.tensor([1]), tensor(1, 2)),
        (0,),
    ),
    "aten": (lambda x: torch.ops.aten.add_.Tensor(x, 1), (tensor(4),), (0,)),
}


@pytest.mark.parametrize("name", WRITES)
def test_written_inputs(name: str) -> None:
    fn, args, positions = WRITES[name]
    facts = facts_of(fn, *args)
    assert facts.written_inputs == positions
    assert facts.work().mutation is bool(positions)


def test_batch_norm_writes_its_statistics_in_training_only() -> None:
    model = nn.BatchNorm1d(3)
    facts = facts_of(model, tensor(4, 3))
    names = [facts.inputs[i].name for i in facts.written_inputs]
    assert len(names) == 3, names
    assert facts_of(model.eval(), tensor(4, 3)).written_inputs == ()


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_dims(dynamic: bool) -> None:
    facts = facts_of(lambda x, y: x @ y, tensor(5, 6), tensor(6, 7), dynamic=dynamic)
    assert facts.dynamic is dynamic
    assert len(facts.dynamic_dims) == (4 if dynamic else 0)
    assert facts.flops == 2 * 5 * 6 * 7, "a dynamic size counts with its hint"


def test_collecting_adds_no_guard() -> None:
    """One dynamic graph serves every size: a fact that asked for a size would pin it."""
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        environment = torch._guards.TracingContext.get().fake_mode.shape_env
        before = len(environment.guards), environment._version_counter
        seen.append(collect(gm, inputs))
        assert (len(environment.guards), environment._version_counter) == before
        return gm.forward

    compiled = torch.compile(lambda x, w: F.softmax(x @ w, -1), backend=backend, dynamic=True)
    for rows in (5, 8, 64, 1000):
        compiled(tensor(rows, 6), tensor(6, 7))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("fn", "random"),
    [
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: torch.rand_like(x) + x, True),
        (lambda x: x.clone().normal_(), True),
        (lambda x: F.dropout(x, 0.5, training=False) + x.cos(), False),
        (lambda x: torch.dropout(x, 0.5, train=True), True),
        (lambda x: F.rrelu(x), False),
        (lambda x: F.rrelu(x, training=True), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: x.cos(), False),
    ],
)
def test_random(fn: Callable[..., Any], random: bool) -> None:
    assert facts_of(fn, tensor(4, 4)).random is random


def test_bodies_of_higher_order_ops_are_counted() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cumsum(0), (x,))

    ops = dict(facts_of(fn, tensor(4)).ops)
    assert ops.get("sin") == 1
    assert ops.get("cumsum") == 1


def test_subclasses() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    facts = facts_of(lambda x: x.sin() + 1, TwoTensor(tensor(3), tensor(3)))
    assert facts.subclasses == ("TwoTensor",)
    assert facts.work().subclasses == {"TwoTensor"}


def test_no_tensor_input() -> None:
    facts = facts_of(lambda: torch.ones(3) * 2)
    assert (facts.inputs, facts.devices, facts.dynamic) == ((), ("cpu",), False)
