"""Sums over many numbers are as exact as eager's, whatever lies beside them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lowering import moments, reductions
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_contract
from tests.support.regions import hold, no_cached_graphs
from tests.support.reports import graph_reports, whole_graphs_by

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes).add(1).to(memory_format=torch.channels_last)


# Counts with divisors of any size and with none, one and several dimensions.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "tokens": (lambda x: (x * 2).mean(1), lambda: torch.rand(2, 1024, 40)),
    "a prime": (lambda x: (x * 2).sum(0), lambda: torch.rand(1009, 48) + 1),
    "twice a prime": (lambda x: (x * 2).sum(0, keepdim=True), lambda: torch.rand(2 * 1009, 48)),
    "many": (lambda x: (x * 2).mean(0), lambda: torch.rand(50021, 16)),
    "two dimensions": (lambda x: (x * 2).sum((0, 1)), lambda: torch.rand(8, 300, 32)),
    "one of them short": (lambda x: (x * 2).mean((0, 2)), lambda: torch.rand(3, 16, 700, 9)),
    "pixels": (lambda x: functional.adaptive_avg_pool2d(x * 2, 1), lambda: image(1, 64, 56, 56)),
    "large pictures": (lambda x: (x * 2).mean((2, 3)), lambda: image(1, 16, 112, 90)),
    "pixels of a view": (lambda x: (x * 2).flatten(2).mean(-1), lambda: image(2, 24, 30, 31)),
    "lying across": (
        lambda x: (x * 2).sum((1, 3), keepdim=True),
        lambda: torch.rand(30, 20, 12, 5).permute(3, 0, 2, 1),
    ),
    "variance lying across": (
        lambda x: (x * 2).var(-1),
        lambda: torch.rand(3, 700, 24).transpose(1, 2),
    ),
    "pixels in rows": (lambda x: (x * 2).mean((2, 3)), lambda: torch.rand(2, 24, 30, 31)),
    "variance": (lambda x: (x * 2).var(0), lambda: torch.rand(2000, 24)),
    "deviation": (lambda x: (x * 2).std(1, correction=0), lambda: torch.rand(3, 2000, 24)),
    "float64": (lambda x: (x * 2).sum(0), lambda: torch.rand(4096, 24, dtype=torch.float64)),
    "a loss": (lambda x: functional.mse_loss(x, x * 2 + 1), lambda: torch.rand(24, 99, 100)),
    "all of it": (lambda x: (x * 2).sum(), lambda: torch.rand(5, 2003)),
    "all, channels last": (lambda x: (x * 2).mean(), lambda: image(2, 24, 31, 33)),
    "all, lying across": (lambda x: (x * 2).sum(), lambda: torch.rand(40, 50, 60).permute(2, 0, 1)),
    "all, with gaps": (lambda x: (x * 2).sum((0, 1)), lambda: torch.rand(40, 500)[:, :301]),
    "long rows": (lambda x: (x * 2).sum(-1, keepdim=True), lambda: torch.rand(3, 20011)),
    "rows of rows": (lambda x: (x * 2).mean((1, 2)), lambda: torch.rand(3, 17, 1009)),
    "rows and batches": (lambda x: (x * 2).sum((0, 3)), lambda: torch.rand(40, 3, 2, 3000)),
    "short rows, many batches": (lambda x: (x * 2).sum((0, 2)), lambda: torch.rand(5000, 3, 5)),
    "of channels": (lambda x: (x * 2).flatten(1).sum(1), lambda: image(2, 7, 56, 58)),
    "of one channel": (lambda x: (x * 2).sum((2, 3)), lambda: torch.rand(3, 1, 2000, 2)),
    "of few pixels": (lambda x: (x * 2).flatten(1).sum(1), lambda: image(2, 16, 7, 8)),
    "their norm": (lambda x: (x * 2).flatten(1).norm(dim=1), lambda: image(2, 96, 20, 21)),
    "variance of a row": (lambda x: (x + 3).var(-1), lambda: torch.rand(3, 22736)),
    "variance of all": (lambda x: (x + 3).var(), lambda: torch.rand(30, 1000)),
    "both of columns": (
        lambda x: torch.stack(torch.var_mean(x * 2, 0)),
        lambda: torch.randn(4096, 24) + 2,
    ),
    "both, deviations": (
        lambda x: torch.stack(torch.std_mean(x * 2, (0, 1), keepdim=True)),
        lambda: torch.randn(40, 50, 24) + 2,
    ),
    "variance and a mean of a row": (
        lambda x: torch.var_mean(x * 2, -1)[0],
        lambda: torch.randn(3, 4096) + 100,
    ),
    "the same, uncorrected": (
        lambda x: torch.var_mean(x * 2, -1, correction=0)[0],
        lambda: torch.randn(3, 4096) + 100,
    ),
    "both of all": (
        lambda x: torch.stack(torch.var_mean(x * 2)),
        lambda: torch.rand(997, 127),
    ),
    "numbers of another kind": (
        lambda x: (x * 1000).long().sum(0, dtype=x.dtype),
        lambda: torch.rand(10000, 7),
    ),
    "few": (lambda x: (x * 2).sum(0), lambda: torch.rand(100, 24)),
    "rows": (lambda x: (x * 2).sum(1), lambda: torch.rand(24, 1000)),
}


def in_double(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in given.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(3))
def test_compiled(part: int) -> None:
    """Many in one graph, each of an image of its own: most of the time goes into single graphs."""
    given = {name: CASES[name][1]() for name in [*CASES][part::3]}

    def function(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: CASES[name][0](x) for name, x in given.items()}

    compiled = compile_at("O2", function)
    with torch.no_grad():
        got, own = compiled(given), function(given)
        assert_contract(got, own, function(in_double(given)), "sums")
    strides = [{name: x.stride() for name, x in found.items()} for found in (got, own)]
    assert strides[0] == strides[1]
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_the_same(name: str) -> None:
    function, make = CASES[name]
    x = make().double()
    graph = make_fx(function, tracing_mode="fake")(x)
    moments.put_right(graph.graph)
    reductions.put_right(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(x), function(x))
    for target in (aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            assert numbers_of_a_sum(node) <= (100 if name == "few" else 64 * lanes(node))
            assert node.meta["val"].shape == graph_shape(node)
    torchs = [node for node in graph.graph.nodes if "kernel_dispatch" in str(node.target)]
    assert len(torchs) == (name == "large pictures")
    assert all(node.args[0].meta["val"].shape == x.shape for node in torchs)  # uncut


def numbers_of_a_sum(node: torch.fx.Node) -> int:
    return int(node.args[0].meta["val"].numel() / node.meta["val"].numel())


def lanes(node: torch.fx.Node) -> int:
    """How many neighbours of one sum are added at once."""
    value = node.args[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else range(value.dim())
    return 16 if any(value.stride(dim) == 1 and value.shape[dim] > 1 for dim in dims) else 1


def graph_shape(node: torch.fx.Node) -> torch.Size:
    """Of what the node gives, computed anew."""
    values = torch.fx.node.map_arg(node.args, lambda one: torch.empty(one.meta["val"].shape))
    return node.target(*values).shape


def normalised_columns(x: Tensor) -> Tensor:
    return functional.gelu(functional.layer_norm(x.t(), (x.shape[0],)))


def test_a_norm_of_numbers_that_lie_apart() -> None:
    x, compiled = torch.randn(2000, 48) + 10, compile_at("O2", normalised_columns)
    with torch.no_grad():
        own, exact = normalised_columns(x), normalised_columns(x.double())
        assert_contract(compiled(x), own, exact, "a norm of columns")
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.parametrize("mean", [0, 100])
def test_rows_of_a_norm(mean: int) -> None:
    def norms(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: functional.layer_norm(x * 2, x.shape[-1:]) for name, x in given.items()}

    given = {f"{numbers}": torch.randn(8, numbers) + mean for numbers in (100, 768, 4096)}
    compiled = compile_at("O2", norms)
    with torch.no_grad():
        assert_contract(compiled(given), norms(given), norms(in_double(given)), f"around {mean}")
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.parametrize("keepdim", [False, True])
def test_rows_that_are_the_same_everywhere(keepdim: bool) -> None:
    def moments_too(x: Tensor) -> list[Tensor]:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=keepdim)
        return [functional.layer_norm(x, x.shape[-1:]) * 1.5, var * 1.5, mean * 1.5]

    def of_each(given: list[Tensor]) -> list[list[Tensor]]:
        return [moments_too(x) for x in given]

    values = torch.tensor([0.1, 12345.67, 3e4, -7.3, 1e10, 0.0])
    given = [values[:, None].expand(-1, n).contiguous() for n in (7, 100, 768, 1024, 1500)]
    compiled = compile_at("O2", of_each)
    with torch.no_grad():
        found = compiled(given)
        for x, (normed, var, mean) in zip(given, found, strict=True):
            assert normed.eq(0).all(), x.shape
            assert var.le(1e-12 * values.square().reshape_as(var)).all(), x.shape
            torch.testing.assert_close(mean, moments_too(x)[2], rtol=1e-7, atol=0)
    assert whole_graphs_by(compiled) == {"inductor"}


@pytest.mark.quick
@pytest.mark.parametrize("apart", [False, True])
def test_norms_read_rows_once(apart: bool) -> None:
    """Only those that gather their rows are taken apart."""

    def norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x.t() if apart else x, (2000,))

    x = torch.rand(2000, 48) if apart else torch.rand(48, 2000)
    graph = make_fx(norm, select_decomp_table(), tracing_mode="fake")(x)
    moments.put_right(graph.graph)
    found = graph.graph.find_nodes(op="call_function", target=aten.var_mean.correction)
    assert len(found) == (not apart)


@pytest.mark.quick
@pytest.mark.parametrize("weights", [False, True])
def test_norms_of_long_lines_stay_one_loop(weights: bool) -> None:
    """Each of two sums over them would be torch's kernel (a fifth of wav2vec2's time)."""

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        given = scale if weights else None
        return functional.group_norm(x.transpose(1, 2), 96, given, given)

    made = make_fx(norm, select_decomp_table(), tracing_mode="fake")
    graph = made(torch.rand(1, 1000, 96), torch.rand(96))
    moments.put_right(graph.graph)
    assert len(graph.graph.find_nodes(op="call_function", target=aten.var_mean.correction)) == 1


def test_counts_that_change() -> None:
    """Torch's kernel, as exact as it is; none of the sizes is compiled for itself."""
    model = nn.Linear(24, 24).eval()
    compiled = compile_at("O2", lambda x: model(x).mean(1))
    for count in (5, 64, 2048, 4096, 31):
        x = torch.randn(2, count, 24) + 1
        with torch.no_grad():
            wide = torch.nn.functional.linear(
                x.double(), model.weight.double(), model.bias.double()
            ).mean(1)
            assert_contract(compiled(x), model(x).mean(1), wide, f"{count}")
    assert len(graph_reports(compiled)) <= 2


def test_equal_numbers_do_not_vary() -> None:
    """Whoever divides by a deviation asks whether it is 0."""

    def deviations(given: dict[tuple[int, float], Tensor]) -> dict[tuple[int, float], Tensor]:
        return {(dim, factor): (x * 2).std(dim) for (dim, factor), x in given.items()}

    given = {
        (dim, factor): torch.rand(1, 24).mul(factor).expand(3001, 24).movedim(0, dim).contiguous()
        for dim in (0, 1)
        for factor in (1.0, 1e33)
    }
    varying = [case for case, found in compile_at("O2", deviations)(given).items() if found.any()]
    assert not varying


LOSSES = ("mean", "sum", "std")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [3, 3000])
@pytest.mark.parametrize("sizes", [(20,), (7, 300), (4, 16, 18)])
def test_losses_over_batches_that_change(sizes: tuple[int, ...], first: int) -> None:
    """What is counted is summed up by generated code, many batches by torch's kernel; neither is
    compiled anew."""

    def losses(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: getattr((x * 2).square(), name)() for name, x in given.items()}

    compiled = compile_at("O2", losses)
    for count in (first, first + 1, 4 * first):
        given = {name: torch.rand(count, *sizes) for name in LOSSES}
        for x in given.values():
            torch._dynamo.mark_dynamic(x, 0)
        assert_contract(compiled(given), losses(given), losses(in_double(given)), f"{count}")
    (graph,) = graph_reports(compiled)
    assert graph.provider == "inductor"


def test_what_is_counted_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as big as the batch is written for torch's kernel."""
    graphs: list[torch.fx.Graph] = []
    put_right = reductions.put_right
    monkeypatch.setattr(
        reductions, "put_right", lambda graph: (put_right(graph), graphs.append(graph))
    )
    x = torch.rand(3000, 7, 300)
    torch._dynamo.mark_dynamic(x, 0)
    compile_at("O2", lambda x: (x * 2).mean())(x)
    (last,) = [node for node in graphs[0].nodes if "kernel_dispatch" in str(node.target)]
    assert last.args[0].meta["val"].shape[1:] == (1, 1)


def test_gradients_of_a_bias_over_many_rows() -> None:
    layers = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 8))
    x = torch.randn(4096, 16) + 1

    def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        model.zero_grad()
        call(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    got = gradients(layers, compile_at("O2", layers), x)
    own = gradients(layers, layers, x)
    wide = gradients(layers.double(), layers, x.double())
    assert_contract(got, own, wide, "gradients")


def test_a_pooled_network() -> None:
    parts = (nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*parts, nn.Linear(24, 5)).eval()
    hold(compile_at("O2", model), model, torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize("dim", [0, 1])
def test_counts_that_depend_on_the_data(dim: int) -> None:
    """Nothing is known of them that could be compared."""

    def normalised(x: Tensor) -> Tensor:
        found = x.nonzero().float()
        return functional.softmax(found, dim) * (found + 1).mean(dim, keepdim=True)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_at("O2", normalised)
        for count in (40, 7):
            x = torch.zeros(64)
            x[:count] = 1
            torch.testing.assert_close(compiled(x), normalised(x))
    assert whole_graphs_by(compiled) == {"inductor"}
