"""Functions with recurrent layers are captured for us, and the layers run as one call each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, rnn

import kernel_dispatch
from lowering import machine
from tests.support.compiling import compile_at, every_row_applies
from tests.support.modules import Of
from tests.support.numerics import assert_bit_identical
from tests.support.regions import (
    assert_regions,
    compile_in,
    hold,
    no_cached_graphs,
    packed_count,
    region_rows,
)
from tests.support.reports import fallbacks_of, graph_reports

Tensor = torch.Tensor
PLACES = ["O1 eager", "O2 eager", "O2 openmp"]


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with every_row_applies(), no_cached_graphs():
        yield
    assert not torch._dynamo.config.allow_rnn, "the switch is as it was"


def tagger(layer: Any, **more: Any) -> nn.Module:
    """A linear layer, the recurrent one, a linear layer."""

    def tag(m: Any, x: Tensor, *state: Any) -> Any:
        out, last = m.layer(m.embed(x), *state)
        return m.head(out), last

    size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    embed, head = nn.Linear(12, layer.input_size), nn.Linear(size, 5)
    return Of(tag, embed=embed, layer=layer, head=head, **more)


def of_graph(compiled: Any) -> list[tuple[str, str, int, int]]:
    return [row for row in region_rows(compiled) if row[0] == "recurrent"]


KINDS = {
    "lstm": functools.partial(nn.LSTM, 16, 20, 2, bidirectional=True, batch_first=True),
    "gru": functools.partial(nn.GRU, 16, 20, 2, bidirectional=True, batch_first=True),
    "tanh": functools.partial(nn.RNN, 16, 20),
    "relu": functools.partial(nn.RNN, 16, 20, nonlinearity="relu", bias=False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_with_one_call(kind: str, place: str) -> None:
    model, x = tagger(KINDS[kind]()), torch.randn(3, 7, 12)
    compiled = compile_in(place, model, fullgraph=True)
    hold(compiled, model, x)
    hold(compiled, model, x)
    assert of_graph(compiled) == [("recurrent", place.split()[1], 1, 2)]
    assert len(graph_reports(compiled)) == 1
    assert not fallbacks_of(compiled)


def test_the_report_has_the_weights() -> None:
    model = tagger(nn.GRU(16, 20))
    compiled = compile_in("O2 openmp", model)
    hold(compiled, model, torch.randn(3, 7, 12))
    assert_regions(compiled, ("recurrent", "openmp", 1, 1), ("linear", "openmp", 2, 2))
    text = str(kernel_dispatch.report(compiled))
    numbers = sum(p.numel() for p in model.layer.parameters()) * 4 / 1e6
    assert f"region recurrent x1: openmp, ran 1 times; weights: prepack (+{numbers:.3g} MB)" in text


def test_state_goes_in_and_comes_back() -> None:
    model = tagger(nn.LSTM(16, 20, 2))
    compiled = compile_in("O2 openmp", model)
    x, state = torch.randn(7, 3, 12), (torch.randn(2, 3, 20), torch.randn(2, 3, 20))
    with torch.no_grad():
        _, got = compiled(x, state)
        _, own = model(x, state)
        for mine, eagers in zip(got, own, strict=True):
            torch.testing.assert_close(mine, eagers)
        after, _ = compiled(x, got)
        torch.testing.assert_close(after, model(x, own)[0])
    assert of_graph(compiled) == [("recurrent", "openmp", 1, 2)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_layer_alone(level: str) -> None:
    layer, x = nn.LSTM(16, 20).eval(), torch.randn(9, 16)  # of one sequence, without a batch
    compiled = compile_at(level, layer)
    hold(compiled, layer, x)
    hold(compiled, layer, torch.randn(9, 2, 16))
    assert {row[:2] for row in of_graph(compiled)} <= {
        ("recurrent", "openmp"),
        ("recurrent", "eager"),
    }
    assert len(of_graph(compiled)) == 2


def test_sizes_that_change() -> None:
    model = tagger(nn.GRU(16, 20, batch_first=True))
    compiled = compile_in("O2 openmp", model)
    for batch, steps in ((2, 5), (2, 9), (2, 2000), (4, 31), (7, 2)):
        hold(compiled, model, torch.randn(batch, steps, 12))
    assert len(graph_reports(compiled)) <= 3
    assert sum(row[3] for row in of_graph(compiled)) == 5
    assert {row[1] for row in of_graph(compiled)} == {"openmp"}


REFUSED = {
    "projections": lambda: nn.LSTM(16, 20, proj_size=6, batch_first=True),
    "float64": lambda: nn.GRU(16, 20),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_left_to_torch(what: str, level: str) -> None:
    model, x = tagger(REFUSED[what]()), torch.randn(3, 7, 12)
    if what == "float64":
        model, x = model.double(), x.double()
    compiled = compile_at(level, model)
    hold(compiled, model, x)
    assert of_graph(compiled) == [("recurrent", "eager", 1, 1)]
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_packed_sequences(level: str) -> None:
    layer = nn.LSTM(16, 20, bidirectional=True).eval()
    packed = rnn.pack_sequence([torch.randn(n, 16) for n in (7, 5, 2)])
    compiled = compile_at(level, lambda given: layer(given))
    with torch.no_grad():
        (got, (hidden, cell)), (own, (own_hidden, own_cell)) = compiled(packed), layer(packed)
    for mine, eagers in ((got.data, own.data), (hidden, own_hidden), (cell, own_cell)):
        torch.testing.assert_close(mine, eagers)
    assert torch.equal(got.batch_sizes, own.batch_sizes)
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dropout_between_layers_draws_eagers_numbers(level: str) -> None:
    layer, x = nn.GRU(16, 20, 3, dropout=0.5).train(), torch.randn(7, 3, 16)
    compiled = compile_at(level, lambda x: layer(x * 2)[0] + 1)
    with torch.no_grad():
        torch.manual_seed(7)
        got = compiled(x)
        torch.manual_seed(7)
        torch.testing.assert_close(got, layer(x * 2)[0] + 1)
    assert of_graph(compiled) == [("recurrent", "eager", 1, 1)]


def test_weights_that_are_made_in_the_graph() -> None:
    """Weight norm: they are computed ahead of the call, and packed like any other."""
    layer = nn.LSTM(16, 48).eval()
    parametrize.register_parametrization(layer, "weight_hh_l0", _Halved())
    model, x = tagger(layer), torch.randn(7, 3, 12)
    compiled = compile_in("O2 openmp", model)
    hold(compiled, model, x)
    before = packed_count()
    hold(compiled, model, x)
    assert packed_count() == before, "nothing is packed in every call"


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_changed_weights_show() -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    compiled = compile_in("O2 openmp", model)
    hold(compiled, model, x)
    with torch.no_grad():
        model.layer.weight_hh_l0.mul_(3)
        model.layer.bias_ih_l0.add_(1)
    hold(compiled, model, x)
    model.load_state_dict(tagger(nn.LSTM(16, 20)).state_dict())
    hold(compiled, model, x)
    assert of_graph(compiled) == [("recurrent", "openmp", 1, 3)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, kind: Any) -> None:
    """Few products are ours, and all that the CPU does not multiply as they are."""
    model, x = tagger(kind(16, 20, 2)).to(dtype), torch.randn(7, 3, 12, dtype=dtype)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    ((region, provider, *counts),) = of_graph(compiled)
    assert (region, counts) == ("recurrent", [1, 1])
    isa = machine.cpu().isa
    torchs = multiplied_by_the_cpu(dtype) and (kind is nn.LSTM or "amx_tile" not in isa)
    assert provider == ("eager" if torchs else "openmp")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_products_in_half_precision(dtype: torch.dtype) -> None:
    model, x = tagger(nn.GRU(16, 600)).to(dtype), torch.randn(4, 8, 12, dtype=dtype)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    ((_, provider, *_),) = of_graph(compiled)
    assert provider == ("eager" if multiplied_by_the_cpu(dtype) else "openmp")


def multiplied_by_the_cpu(dtype: torch.dtype) -> bool:
    feature = "avx512_bf16" if dtype is torch.bfloat16 else "amx_fp16"
    return feature in machine.cpu().isa


# --- when Dynamo is told, and when it is not -----------------------------------------------------


def test_training_is_as_it_was() -> None:
    """Dynamo leaves the function to Python, gradients are torch's."""
    model, x = tagger(nn.LSTM(16, 20)).train(), torch.randn(7, 3, 12)
    compiled = compile_at("O2", model)
    compiled(x)[0].sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x)[0].sum().backward()
    assert_bit_identical(got, [p.grad for p in model.parameters()], "gradients")
    assert of_graph(compiled) == []


def test_inference_after_training_and_before() -> None:
    model, x = tagger(nn.GRU(16, 20)), torch.randn(7, 3, 12)
    compiled = compile_at("O2", model)
    hold(compiled, model, x)
    compiled(x)[0].sum().backward()
    assert model.layer.weight_hh_l0.grad is not None
    hold(compiled, model, x)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_backends_get_what_they_got(backend: str) -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    with torch.no_grad():
        compile_at("O1", tagger(nn.LSTM(16, 20)))(x)
        other = torch.compile(model, backend=backend, fullgraph=True)
        with pytest.raises(Exception, match="RNN, GRU, or LSTM"):
            other(x)


def test_it_holds_after_a_reset() -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    compiled = compile_at("O1", model)
    hold(compiled, model, x)
    torch.compiler.reset()
    seen: list[int] = []
    torch._dynamo.callback.on_compile_start(lambda args: seen.append(1))
    hold(compiled, model, x)
    assert of_graph(compiled) == [("recurrent", "eager", 1, 1)]
    assert seen, "the user's own callbacks are called as well"
    torch.compiler.reset()
    count = len(seen)
    hold(compiled, model, x)
    assert len(seen) == count, "and forgotten, as torch promises"


def test_a_backend_given_as_a_function() -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    options = {"level": "O1"}
    for backend, more in (
        (kernel_dispatch.unified, {"options": options}),
        (functools.partial(kernel_dispatch.unified, options=options), {}),
    ):
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True, **more)
        hold(compiled, model, x)


def test_only_captures_of_ours_are_told_by_sizes() -> None:
    """Whoever else traces such a layer, with his own switch on, gets all its steps as before."""
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = nn.GRU(16, 20).eval(), torch.randn(5, 3, 16)
    hold(compile_at("O1", layer), layer, x)  # ours, so that everything is in its place
    with torch.no_grad():
        graph = make_fx(lambda x: layer(x)[0], tracing_mode="real")(x)
        torch.testing.assert_close(graph(x), layer(x)[0])
    assert len(graph.graph.nodes) > 5 * 5
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        hold(torch.compile(layer, backend="aot_eager", fullgraph=True), layer, x)


def test_another_device_is_not_asked() -> None:
    """Vendors have layers of their own; a dry run names the device."""
    from kernel_dispatch.capturing import _infers_on_the_cpu

    on_cpu, elsewhere = {"options": {"device": "cpu"}}, {"options": {"device": "cuda"}}
    here, there = torch.ones(2), torch.ones(2, device="meta")
    with torch.no_grad():
        assert _infers_on_the_cpu(on_cpu, {"x": there})
        assert not _infers_on_the_cpu(elsewhere, {"x": here})
        assert _infers_on_the_cpu({}, {"self": nn.LSTM(3, 4), "args": (here, [here]), "n": 3})
        assert not _infers_on_the_cpu({}, {"args": (here, {"y": there})})
        assert not _infers_on_the_cpu({}, {"self": nn.LSTM(3, 4, device="meta")})
        with torch.autocast("cpu", torch.bfloat16):
            assert not _infers_on_the_cpu(on_cpu, {"x": here})
    assert not _infers_on_the_cpu(on_cpu, {"x": here})


def test_a_wrong_option_is_the_users_error_still() -> None:
    compiled = torch.compile(tagger(nn.LSTM(16, 20)), backend="unified", options={"levle": "O1"})
    with torch.no_grad(), pytest.raises(kernel_dispatch.SettingError, match="levle"):
        compiled(torch.randn(7, 3, 12))


def test_it_is_told_what_to_do_with_gradients_on() -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    told = str(kernel_dispatch.explain(model, x))
    assert "under torch.no_grad() on a CPU, unified captures it" in told


@pytest.mark.parametrize("device", ["cpu", "cuda:sm90"])
def test_a_dry_run_captures_what_its_device_would(device: str) -> None:
    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    with torch.no_grad():
        told = kernel_dispatch.dry_run(model, (x,), device=device)
    assert len(told.graphs) == (1 if device == "cpu" else 0)
    assert ("recurrent x1: openmp" in str(told)) == (device == "cpu")


def test_a_backend_around_ours() -> None:
    """A function that says by `functools.wraps` whom it stands for."""
    seen: list[int] = []

    @functools.wraps(kernel_dispatch.unified)
    def counting(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(len(gm.graph.nodes))
        return kernel_dispatch.unified(gm, inputs, **kwargs)

    model, x = tagger(nn.LSTM(16, 20)), torch.randn(7, 3, 12)
    hold(torch.compile(model, backend=counting, options={"level": "O1"}, fullgraph=True), model, x)
    assert len(seen) == 1


def test_named_before_torch_compiles_anything(python: Any) -> None:
    script = """
import torch
from kernel_dispatch import unified
layer, x = torch.nn.LSTM(8, 8).eval(), torch.randn(3, 2, 8)
with torch.no_grad():
    compiled = torch.compile(layer, backend=unified, fullgraph=True, options={"level": "O1"})
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
print("captured")
"""
    assert python(script).stdout.strip() == "captured"
