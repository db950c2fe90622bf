"""What a compiled graph must mean: eager's values, eager's effects on inputs, eager's errors.

Each case runs at every level; the numbers are held to the level's contract and the report has to
say that the graph ran where and with whom it was planned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import kernel_dispatch
from kernel_dispatch.numerics import is_inexact, to_reference
from tests.support import torches
from tests.support.compiling import compile_at
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.reports import assert_ran_as_planned, whole_graphs_by

LEVELS = ("O0", "O1", "O2")
PLANNED = {"O0": "eager", "O1": "eager", "O2": "inductor", "O3": "inductor"}

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def copied(tree: Any) -> Any:
    """Leaf copies with the same strides; None, numbers and the like as they are."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy_leaf, tree)


def widened(fn: Callable[..., Any]) -> Callable[..., Any]:
    return copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn


def with_effects(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Outputs, the inputs after the call, and a module's state after the call."""
    outputs = fn(*args)
    inner = getattr(fn, "_orig_mod", fn)
    state = dict(inner.state_dict()) if isinstance(inner, nn.Module) else {}
    return outputs, args, {name: value.clone() for name, value in state.items()}


def plain(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def hold(level: str, candidate: Any, eager: Any, reference: Any, where: str) -> None:
    if level == "O0":
        assert_bit_identical(plain(candidate), plain(eager), where)
    else:
        assert_contract(plain(candidate), plain(eager), plain(reference), where)


def check(
    level: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    provider: str | None = None,
    calls: int = 2,
    **kwargs: Any,
) -> Any:
    """Run eager, the float64 reference and the compiled function; return the compiled function.

    Each call works on copies, so that a second call is not answered from the first one's effects.
    """
    eager_fn, reference_fn = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn, widened(fn)
    compiled = compile_at(level, fn, **kwargs)
    for call in range(calls):
        eager = with_effects(eager_fn, copied(args))
        reference = with_effects(reference_fn, to_reference(copied(args)))
        candidate = with_effects(compiled, copied(args))
        hold(level, candidate, eager, reference, f"{level}, call {call}")
    assert_ran_as_planned(compiled, level)
    assert whole_graphs_by(compiled) == {provider or PLANNED[level]}
    for graph in kernel_dispatch.report(compiled):
        assert graph.runs_by_provider == {graph.provider: graph.runs}
        assert graph.as_dict()["runs"] == graph.runs
    return compiled


# --- forward, one table ---------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8)).eval()


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y.relu())
    return (x * 2).sum(0)


def cache_update(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As a static KV cache does: write one row, attend over all of them."""
    cache.index_copy_(0, at, new)
    return torch.softmax(cache @ cache.transpose(0, 1), -1) @ cache


def slice_written(x: torch.Tensor) -> torch.Tensor:
    x[1:3].mul_(3)
    x[:, 0] = 1.5
    return x.cumsum(0)


def transposed_written(x: torch.Tensor) -> torch.Tensor:
    x.t().add_(torch.arange(4.0, dtype=x.dtype)[:, None])
    return x.sum()


def two_written(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    y.copy_(x + y)
    return x - y, y.sum()


def nested(x: torch.Tensor) -> Any:
    a = x.sin() + 1
    return {"a": a, "b": [a * 2, None, (3, "word", 2.5)], "c": {"d": x.shape[0], "e": True}}


def scalars(x: torch.Tensor, n: int, scale: float, flag: bool, nothing: None) -> torch.Tensor:
    y = x.exp() * scale + n
    return y.neg() if flag and nothing is None else y


def integers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x * 3 + y
    return z, z > 4, z // 2, (z > 4).any(), z.argmax(), (x & y) | 1, z.bitwise_left_shift(1)


def autocast(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype != torch.float64):
        y = F.relu(x @ w)
    return y.to(x.dtype) + 1, (x @ w).tanh()


def complex_numbers(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = z * (1 + 2j) + z.conj()
    return y, y.abs(), torch.view_as_real(y).sum(-1), y.real + y.imag


def conditional(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))


def looped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(
        lambda i, y: i < 4, lambda i, y: (i + 1, y * 1.5 + 1), (torch.tensor(0), x.clone())
    )


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (mlp(), (torch.randn(5, 16),)),
    "conv_bn": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(),
        (torch.randn(2, 3, 10, 10),),
    ),
    "conv_bn_training": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).requires_grad_(False),
        (torch.randn(2, 3, 10, 10),),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)),
        (torch.randint(0, 20, (3, 5)),),
    ),
    "attention": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
        tuple(torch.randn(2, 3, 7, 8) for _ in range(3)),
    ),
    "written": lambda: (written, (torch.randn(4, 5), torch.randn(4, 5))),
    "kv_cache": lambda: (
        cache_update,
        (torch.randn(6, 8), torch.tensor([2]), torch.randn(1, 8)),
    ),
    "slice_written": lambda: (slice_written, (torch.randn(4, 5),)),
    "transposed_written": lambda: (transposed_written, (torch.randn(3, 4),)),
    "two_written": lambda: (two_written, (torch.randn(4), torch.randn(4))),
    "non_contiguous": lambda: (
        lambda x, y: (x.relu() + y, x.reshape(-1)[1:] * 2),
        (torch.randn(6, 4).t(), torch.randn(8, 12)[::2, ::2]),
    ),
    "expanded": lambda: (lambda x: (x * 2 + 1).sum(0), (torch.randn(1, 5).expand(4, 5),)),
    "views": lambda: (
        lambda x: (x.view(2, 6) + 1, x.transpose(0, 1)[1] * 2, x.unfold(0, 2, 1).sum()),
        (torch.randn(4, 3),),
    ),
    "empty": lambda: (
        lambda x, y: (torch.cat([x, y]) + 1, x.sum(), (x @ y.t()).relu()),
        (torch.randn(0, 4), torch.randn(3, 4)),
    ),
    "zero_dim": lambda: (
        lambda x, y: (x * y + 1, x.expand(3) + y, (x > y).logical_not()),
        (torch.tensor(2.5), torch.tensor(-1.25)),
    ),
    "nested_outputs": lambda: (nested, (torch.randn(3, 4),)),
    "scalars": lambda: (scalars, (torch.randn(3), 7, 0.25, True, None)),
    "integers": lambda: (integers, (torch.randint(0, 9, (4, 5)), torch.randint(0, 9, (4, 5)))),
    "bools": lambda: (
        lambda a, b: (a & b, a ^ ~b, (a | b).sum(), torch.where(a, 1, 2)),
        (torch.rand(9) > 0.5, torch.rand(9) > 0.5),
    ),
    "complex": lambda: (complex_numbers, (torch.randn(4, 5, dtype=torch.complex64),)),
    "float64": lambda: (
        lambda x: torch.linalg.vector_norm(x.softmax(-1) @ x.t(), dim=-1),
        (torch.randn(5, 6, dtype=torch.float64),),
    ),
    "bfloat16": lambda: (
        lambda x, w: F.gelu(x @ w) + 1,
        (torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, 8, dtype=torch.bfloat16)),
    ),
    "special_values": lambda: (
        lambda x: (x.relu() + 1, torch.nan_to_num(x) * 2, x.clamp(-1, 1).exp(), x.max()),
        (torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 3.0]),),
    ),
    "cond": lambda: (conditional, (torch.randn(4),)),
    "while_loop": lambda: (looped, (torch.randn(4),)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, level: str) -> None:
    fn, args = CASES[name]()
    with torch.no_grad():
        check(level, fn, args)


@pytest.mark.parametrize("name", ["mlp", "conv_bn", "written", "integers"])
def test_forward_at_o3(name: str) -> None:
    fn, args = CASES[name]()
    with torch.no_grad():
        check("O3", fn, args)


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_region(level: str) -> None:
    """The autocast output has bfloat16's precision, so it is measured as bfloat16."""
    x, w = torch.randn(8, 16), torch.randn(16, 8)

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.relu(x @ w)
        return y, (x @ w).tanh()

    compiled = compile_at(level, fn)
    got, eager = compiled(x, w), fn(x, w)
    assert got[0].dtype == torch.bfloat16
    wide_x, wide_w = to_reference((x, w))
    hold(level, got, eager, (F.relu(wide_x @ wide_w), (wide_x @ wide_w).tanh()), level)
    assert_ran_as_planned(compiled, level)
    assert "bfloat16" in kernel_dispatch.report(compiled)[0].facts.dtypes


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_inside_an_autocast_region(level: str) -> None:
    layer, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU()), torch.randn(4, 16)
    compiled = compile_at(level, layer)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, eager = compiled(x), layer(x)
    assert got.dtype == torch.bfloat16
    with torch.no_grad():
        hold(level, got, eager, widened(layer)(x.double()), level)
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_inference_mode(level: str) -> None:
    model = mlp()
    with torch.inference_mode():
        x = torch.randn(3, 16)
        compiled = compile_at(level, model)
        got, eager = compiled(x), model(x)
        assert got.is_inference()
        hold(level, got, eager, widened(model)(x.double()), level)
    with torch.no_grad():  # and outside of it afterwards, with an ordinary tensor
        y = torch.randn(3, 16)
        hold(level, compiled(y), model(y), widened(model)(y.double()), f"{level} after")
    assert_ran_as_planned(compiled, level)


# --- strides, aliases -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_channels_last_in_and_out(level: str) -> None:
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval().to(memory_format=torch.channels_last)
    )
    x = torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
    with torch.no_grad():
        compiled = check(level, model, (x,))
        assert compiled(x).is_contiguous(memory_format=torch.channels_last)
        assert compiled(x).stride() == model(x).stride()


@pytest.mark.parametrize("level", LEVELS)
def test_output_is_a_view_of_an_input(level: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[1:].t(), x.sin() + 1

    compiled, x = compile_at(level, fn), torch.randn(4, 5)
    view, other = compiled(x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (view.stride(), view.storage_offset()) == ((1, 5), 5)
    x.fill_(7)
    assert bool((view == 7).all())
    assert not bool((other == 7).any())
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_that_share_memory(level: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp() + 1
        return y, y.view(-1)[2:]

    compiled, x = compile_at(level, fn), torch.randn(3, 4)
    whole, part = compiled(x)
    hold(level, (whole, part), fn(x), fn(x.double()), level)
    whole.zero_()
    assert bool((part == 0).all()), "the second output is a copy, eager's is a view of the first"
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_input_returned_as_it_is(level: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.mul_(2)
        return x, x * 2 + y, y

    compiled, x, y = compile_at(level, fn), torch.randn(3), torch.randn(3)
    before = y.clone()
    first, second, third = compiled(x, y)
    assert first is x
    assert third is y
    assert torch.equal(y, before * 2)
    torch.testing.assert_close(second, x * 2 + y)
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_two_inputs_that_share_memory(level: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 10 + y

    compiled = compile_at(level, fn)
    for _ in range(2):
        base, own = torch.arange(6.0), torch.arange(6.0)
        got, eager = compiled(base[:4], base[2:]), fn(own[:4], own[2:])
        assert torch.equal(got, eager)
        assert torch.equal(base, own)
    assert_ran_as_planned(compiled, level)


# --- training -------------------------------------------------------------------------------------


def gradients(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """The outputs and the gradients of inputs and parameters for the same upstream gradient."""
    outputs = [o for o in pytree.tree_leaves(fn(*args)) if is_inexact(o)]
    loss = sum(((o * o + o) * _uneven(o)).sum() for o in outputs)
    loss.backward()
    module = getattr(fn, "_orig_mod", fn)
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    leaves = [a for a in args if isinstance(a, torch.Tensor)] + parameters
    return [loss.detach()] + [leaf.grad for leaf in leaves]


def _uneven(output: torch.Tensor) -> torch.Tensor:
    """Weights that differ by element: the plain sum of a LayerNorm's output, or of its squares, has
    no gradient but rounding noise."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).sin().view(output.shape)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False) + x


TRAINED: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (mlp().train(), (torch.randn(5, 16, requires_grad=True),)),
    "conv_bn": lambda: (
        nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        (torch.randn(2, 3, 8, 8),),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)),
        (torch.randint(0, 20, (3, 5)),),
    ),
    "checkpoint": lambda: (Checkpointed(), (torch.randn(4, 6, requires_grad=True),)),
    "function": lambda: (
        lambda x, y: (x.sin() @ y, (y * 2).exp()),
        (torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)),
    ),
    "activation_written": lambda: (
        lambda x: (x * 2).add_(1).relu_().cumsum(0),
        (torch.randn(3, 4, requires_grad=True),),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, level: str) -> None:
    fn, args = TRAINED[name]()
    eager_fn, wide_fn = (copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn), widened(fn)
    compiled = compile_at(level, fn)
    got = gradients(compiled, copied(args))
    eager = gradients(eager_fn, copied(args))
    reference = gradients(wide_fn, to_reference(copied(args)))
    hold(level, got, eager, reference, f"{name} at {level}")
    if isinstance(fn, nn.Module):
        buffers, eager_buffers = dict(fn.named_buffers()), dict(eager_fn.named_buffers())
        hold(level, buffers, eager_buffers, dict(wide_fn.named_buffers()), "running statistics")
    assert_ran_as_planned(compiled, level)
    assert whole_graphs_by(compiled) == {PLANNED[level]}
    assert all(graph.facts.training for graph in kernel_dispatch.report(compiled))


@pytest.mark.parametrize("level", LEVELS)
def test_three_steps_of_an_optimizer(level: str) -> None:
    torch.manual_seed(1)
    model, x = mlp().train(), torch.randn(8, 16)
    twin, wide = copy.deepcopy(model), widened(model)
    compiled = compile_at(level, model)
    losses = []
    for run, values in ((compiled, x), (twin, x), (wide, x.double())):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.05)
        history = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(values).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        losses.append(torch.stack(history))
    hold(level, *losses, f"losses at {level}")
    assert_ran_as_planned(compiled, level)
    assert len(kernel_dispatch.report(compiled)) == 1, "a step recompiled"


@pytest.mark.parametrize("level", LEVELS)
def test_double_use_of_eval_and_training(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    compiled, x = compile_at(level, model), torch.randn(64, 4)
    model.eval()
    with torch.no_grad():
        hold(level, compiled(x), model(x), widened(model)(x.double()), "eval")
    model.train()
    assert bool((compiled(x) == 0).float().mean() > 0.4)
    kinds = [graph.facts.training for graph in kernel_dispatch.report(compiled)]
    assert kinds == [False, True]


# --- dynamic shapes, graph breaks -----------------------------------------------------------------


def shaped(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (x.softmax(-1) @ x.t()).relu() + x.shape[0], x.shape[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 4), (None, 2)])
def test_dynamic(level: str, dynamic: bool | None, graphs: int) -> None:
    compiled = compile_at(level, shaped, dynamic=dynamic)
    for rows in (5, 7, 9, 11):
        x = torch.randn(rows, 6)
        hold(level, compiled(x), shaped(x), shaped(x.double()), f"{rows} rows")
    records = kernel_dispatch.report(compiled)
    assert_ran_as_planned(compiled, level)
    assert len(records) == graphs
    assert sum(record.runs for record in records) == 4
    assert [bool(r.facts.dynamic) for r in records] == {
        True: [True],
        False: [False] * 4,
        None: [False, True],
    }[dynamic]
    if dynamic is None:
        assert "size" in records[1].recompile_reason


@pytest.mark.parametrize("level", LEVELS)
def test_dynamic_training(level: str) -> None:
    model = mlp().train()
    twin, wide = copy.deepcopy(model), widened(model)
    compiled = compile_at(level, model, dynamic=True)
    for rows in (48, 96):  # with a few rows only, whose rounding is luckier decides
        args = (torch.randn(rows, 16, requires_grad=True),)
        for module in (model, twin, wide):
            module.zero_grad()
        got, eager = gradients(compiled, copied(args)), gradients(twin, copied(args))
        hold(level, got, eager, gradients(wide, to_reference(args)), f"{rows} rows")
    assert_ran_as_planned(compiled, level)
    assert len(kernel_dispatch.report(compiled)) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_mark_dynamic(level: str) -> None:
    compiled = compile_at(level, shaped)
    for rows in (4, 8):
        x = torch.randn(rows, 6)
        torch._dynamo.mark_dynamic(x, 0)
        hold(level, compiled(x), shaped(x), shaped(x.double()), f"{rows} rows")
    assert len(kernel_dispatch.report(compiled)) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_graph_break(level: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2 + y

    compiled = check(level, fn, (torch.randn(4),))
    records = kernel_dispatch.report(compiled)
    assert len(records) == 2
    assert records[0].graph_break is not None
    assert records[0].graph_break.code == "graph-break"
    assert records[1].graph_break is None
    assert [record.runs for record in records] == [2, 2]


# --- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_random(level: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(x, 0.5) + 1, torch.rand_like(x) * x

    compiled, x = compile_at(level, fn), torch.ones(512)

    def draw(fn: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        return fn(x)

    first, second, eager = draw(compiled), draw(compiled), draw(fn)
    assert_bit_identical(first, second, "the same seed again")
    if level == "O0":
        assert_bit_identical(first, eager, "the seed in eager")
    assert not torch.equal(compiled(x)[1], compiled(x)[1]), "the generator does not advance"
    assert set(first[0].unique().tolist()) == {1.0, 3.0}
    assert 0.4 < (first[0] == 1).float().mean() < 0.6
    assert 0 <= float(first[1].min()) < float(first[1].max()) <= 1
    assert_ran_as_planned(compiled, level)
    assert kernel_dispatch.report(compiled)[0].facts.random


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_gradient_uses_the_forward_mask(level: str) -> None:
    compiled = compile_at(level, lambda x: F.dropout(x, 0.5) * 3)
    x = torch.ones(256, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert_ran_as_planned(compiled, level)


# --- subclasses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_subclass_that_aotautograd_accepts(level: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2 + x

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    compiled = compile_at(level, fn)
    got = compiled(TwoTensor(a, b))
    assert type(got) is TwoTensor
    hold(level, (got.a, got.b), (fn(a), fn(b)), (fn(a.double()), fn(b.double())), level)
    assert_ran_as_planned(compiled, level)
    assert kernel_dispatch.report(compiled)[0].facts.subclasses == ("TwoTensor",)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_index_out_of_range_is_eagers_error(level: str) -> None:
    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x[at] * 2 + 1

    compiled, x = compile_at(level, fn), torch.randn(5, 3)
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 5])
    torch.testing.assert_close(compiled(x, good), fn(x, good))
    with pytest.raises(IndexError) as eager:
        fn(x, bad)
    with pytest.raises(IndexError) as got:
        compiled(x, bad)
    assert str(got.value).splitlines()[0] == str(eager.value).splitlines()[0]
    torch.testing.assert_close(compiled(x, good), fn(x, good))
    assert_ran_as_planned(compiled, level)
    assert kernel_dispatch.report(compiled)[0].runs_by_provider == {PLANNED[level]: 2}


@pytest.mark.parametrize("level", LEVELS)
def test_embedding_out_of_range_is_eagers_error(level: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.ReLU())
    compiled = compile_at(level, model)
    with torch.no_grad():
        with pytest.raises(IndexError, match="out of range"):
            compiled(torch.tensor([7]))
        good = torch.tensor([1, 2])
        assert torch.equal(compiled(good), model(good))
    assert_ran_as_planned(compiled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_shape_mismatch_is_an_error_and_demotes_nothing(level: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).relu() + 1

    compiled, x = compile_at(level, fn), torch.randn(3, 4)
    good, bad = torch.randn(4, 5), torch.randn(6, 5)
    torch.testing.assert_close(compiled(x, good), fn(x, good))
    with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied|same reduction dim"):
        compiled(x, bad)
    torch.testing.assert_close(compiled(x, good), fn(x, good))
    assert_ran_as_planned(compiled, level)
    assert all(g.provider == PLANNED[level] for g in kernel_dispatch.report(compiled))


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_of_a_value_is_eagers(level: str) -> None:
    """A singular matrix is the user's error, not a failure of the backend."""
    if level == "O2" and (why := torches.inverts_singular_matrices()):
        pytest.skip(why)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x) * 2

    compiled = compile_at(level, fn)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(3, 3))
    x = torch.eye(3) * 2
    assert torch.equal(compiled(x), fn(x))
    assert_ran_as_planned(compiled, level)


# --- small graphs ---------------------------------------------------------------------------------


@dataclass
class Small:
    elements: int
    provider: str


@pytest.mark.parametrize("small", [Small(16, "eager"), Small(1 << 18, "inductor")])
def test_one_op_is_compiled_only_where_it_moves_much(small: Small) -> None:
    compiled = compile_at("O2", torch.sin)
    x = torch.randn(small.elements)
    hold("O2", compiled(x), x.sin(), x.double().sin(), "sin")
    (record,) = kernel_dispatch.report(compiled)
    assert record.provider == small.provider
    no = {r.provider: [reason.code for reason in r.reasons] for r in record.plan.rejected}
    assert no.get("inductor", []) == (["too-small"] if small.provider == "eager" else [])


def test_complex_pseudo_inverse_is_right() -> None:
    """Stock Inductor returns wrong values here; the capability table leaves the op to eager."""
    x = torch.randn(5, 5, dtype=torch.complex64)
    compiled = compile_at("O2", lambda x: torch.linalg.pinv(x) @ x + 0)
    torch.testing.assert_close(compiled(x), torch.linalg.pinv(x) @ x + 0, rtol=1e-4, atol=1e-4)
    (record,) = kernel_dispatch.report(compiled)
    assert record.provider == "eager"
    assert not record.fallbacks
    refused = next(r for r in record.plan.rejected if (r.target, r.provider) == ("cpu", "inductor"))
    assert [reason.code for reason in refused.reasons] == ["op-unsupported"]
    real = compile_at("O2", lambda x: torch.linalg.pinv(x) @ x + 0)
    torch.testing.assert_close(
        real(x.real), torch.linalg.pinv(x.real) @ x.real, atol=1e-4, rtol=1e-4
    )
    assert kernel_dispatch.report(real)[0].provider == "inductor"
