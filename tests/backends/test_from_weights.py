"""What depends on weights alone is computed once, and again when one of them changed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import kernel_dispatch
from lowering import from_weights
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.modules import Beside
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned, fallbacks_of, graph_reports

LEVELS = ("O1", "O2")
WIDE = 96


@pytest.fixture(autouse=True)
def all_is_known() -> Iterator[None]:
    with no_cached_graphs(), size_limits_lifted():
        yield


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that values were computed."""
    times: list[int] = []
    compute = from_weights._Values._computed

    def counting(self: Any, weights: Any) -> Any:
        times.append(1)
        return compute(self, weights)

    monkeypatch.setattr(from_weights._Values, "_computed", counting)
    return times


class Positions(nn.Module):
    """As DeBERTa: what is known of positions goes through a layer, and is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(32, WIDE), nn.LayerNorm(WIDE)
        self.query, self.key = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(self.norm(self.table.weight).unsqueeze(0))
        keys = keys.view(1, 32, 4, WIDE // 4).permute(0, 2, 1, 3).contiguous()
        queries = self.query(x).view(2, -1, 4, WIDE // 4).transpose(1, 2)
        return torch.matmul(queries, keys.transpose(-1, -2)).softmax(-1)


class Adapted(nn.Module):
    """A layer with an adapter of low rank, merged on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)
        self.a, self.b = nn.Parameter(torch.randn(8, WIDE)), nn.Parameter(torch.randn(WIDE, 8))

    def forward(self, x: Tensor) -> Tensor:
        merged = self.layer.weight + 0.1 * (self.b @ self.a)
        return functional.linear(x, merged, self.layer.bias).relu()


class Distances(nn.Module):
    """As T5: a table of biases, looked up by the distance between two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.layer = nn.Embedding(8, 4), nn.Linear(WIDE, 4 * 32)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(32)
        buckets = (places[None, :] - places[:24, None]).abs().clamp(max=7)
        bias = self.bias(buckets).permute(2, 0, 1).unsqueeze(0)
        scores = self.layer(x).view(2, -1, 4, 32).transpose(1, 2)
        return (scores + bias).softmax(-1)


class Standardized(nn.Module):
    """As BiT: a convolution whose weight is brought to mean 0 and variance 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        flat = weight.reshape(1, 32, -1)
        flat = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return functional.conv2d(x, flat.reshape_as(weight), self.layer.bias).relu()


class Scaled(nn.Module):
    """A weight times a buffer that is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE))
        self.register_buffer("scale", torch.rand(WIDE, WIDE) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.scale)


def rows() -> Tensor:
    return torch.randn(2, 24, WIDE)


# name -> model, input, how many values are computed ahead
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, int]]] = {
    "weight norm, linear": lambda: (
        parametrizations.weight_norm(nn.Linear(WIDE, WIDE)),
        rows(),
        1,
    ),
    "weight norm, convolution": lambda: (
        parametrizations.weight_norm(nn.Conv1d(32, 64, 5, groups=2), dim=2),
        torch.randn(2, 32, 40),
        1,
    ),
    "spectral norm": lambda: (parametrizations.spectral_norm(nn.Linear(WIDE, WIDE)), rows(), 1),
    "positions": lambda: (Positions(), rows(), 1),
    "adapter": lambda: (Adapted(), rows(), 1),
    "distances": lambda: (Distances(), rows(), 1),
    "standardized": lambda: (Standardized(), torch.randn(2, 8, 12, 12), 1),
    "scaled": lambda: (Scaled(), rows(), 1),
}


def region(compiled: Any) -> list[dict[str, Any]]:
    return [
        row
        for graph in graph_reports(compiled)
        for row in graph.as_dict()["regions"]
        if row["region"] == "from_weights"
    ]


def assert_computed_ahead(compiled: Any, count: int, runs: int) -> None:
    """This many values, in each of this many calls, by eager; nothing fell back."""
    assert not fallbacks_of(compiled), fallbacks_of(compiled)
    found = [(row["provider"], row["count"], row["runs"]) for row in region(compiled)]
    assert found == ([("eager", count, count * runs)] if count else []), found


def same(compiled: Any, model: Any, *inputs: Tensor) -> None:
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_report(name: str, level: str, computed: list[int]) -> None:
    model, x, count = MODELS[name]()
    model.eval()
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(3):
            same(compiled, model, x)
    assert_ran_as_planned(compiled, level)
    assert_computed_ahead(compiled, count, 3)
    assert len(computed) == 1
    (row,) = region(compiled)
    assert row["recipes"] == ["fold-constants"]
    assert row["packed_bytes"] > 0


@pytest.mark.parametrize("name", ["weight norm, convolution", "standardized", "adapter"])
def test_later_regions_pack_what_was_computed(name: str) -> None:
    model, x, _ = MODELS[name]()
    model.eval()
    with torch.no_grad():
        compiled = compile_at("O2", model)
        for _ in range(2):
            same(compiled, model, x)
    (report,) = graph_reports(compiled)
    packed = [one.provider for one in report.regions if "prepack" in one.recipes]
    assert packed, report


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def optimizer_step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(-2)


def buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.mul_(3)


def another_parameter(model: nn.Module) -> None:
    for name, value in list(model.named_parameters(recurse=False)):
        setattr(model, name, nn.Parameter(torch.randn_like(value)))


UPDATES = [
    load_state_dict,
    optimizer_step,
    new_data,
    in_place,
    through_data,
    buffers,
    another_parameter,
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_updates_show(update: Callable[[nn.Module], None], level: str, computed: list[int]) -> None:
    model, x = Scaled(), rows()
    compiled = compile_at(level, model)
    with torch.no_grad():
        same(compiled, model, x)
    for times in (2, 3):
        before = model(x).detach().clone()
        update(model)
        with torch.no_grad():
            same(compiled, model, x)
            same(compiled, model, x)
        assert not torch.allclose(before, model(x))
        assert len(computed) == times
    assert_computed_ahead(compiled, 1, 5)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_models_share_code_and_no_values(level: str, computed: list[int]) -> None:
    """A first weight that they share does not make them push each other out, either."""
    one, other = Adapted().eval(), Adapted().eval()
    other.layer.weight = one.layer.weight
    x = rows()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    with torch.no_grad():
        compiled = compile_at(level, call)
        for _ in range(3):
            for model in (one, other):
                torch.testing.assert_close(compiled(model, x), model(x), rtol=1e-4, atol=1e-4)
    assert len(graph_reports(compiled)) == 1
    assert len(computed) == 2
    assert_computed_ahead(compiled, 1, 6)


@pytest.mark.parametrize("level", LEVELS)
def test_training_graphs_are_left_alone(level: str) -> None:
    model, x = Adapted(), rows()
    again = copy.deepcopy(model)
    compiled = compile_at(level, model)
    compiled(x).sum().backward()
    again(x).sum().backward()
    torch.testing.assert_close(model.a.grad, again.a.grad, rtol=1e-3, atol=1e-3)
    assert_computed_ahead(compiled, 0, 1)


def test_a_no_grad_of_the_graphs_own() -> None:
    """Weights that want gradients, in a call that gives none."""

    class Frozen(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    model, x = Frozen(), rows()
    compiled = compile_at("O2", model)
    same(compiled, model, x)
    assert not compiled(x).requires_grad
    assert_computed_ahead(compiled, 1, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_to_weights_with_zeros_shows(level: str) -> None:
    """Pruned weights: what a factor does not change tells nothing. More tensors than a few."""

    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(WIDE, WIDE) for _ in range(5))
            with torch.no_grad():
                for weight in self.weights:
                    weight.flatten()[0] = weight.flatten()[-(WIDE * WIDE // 3)] = 0

        def forward(self, x: Tensor) -> Tensor:
            one, *others = self.weights
            return functional.linear(x, one + sum(other * 2 for other in others))

    model, x = Pruned(), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(3):
            same(compiled, model, x)
            for weight in model.weights:
                weight.data.mul_(2)


# --- what stays in the graph ----------------------------------------------------------------------


class Holding(nn.Module):
    """A weight and what a function makes of it."""

    def __init__(self, function: Callable[..., Any], weight: Tensor | None = None) -> None:
        super().__init__()
        weight = torch.randn(WIDE, WIDE) if weight is None else weight
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.register_buffer("buffer", torch.randn(WIDE, WIDE))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.buffer)


def in_place_use(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    doubled = weight * 2
    doubled[0] += x.sum()
    return x @ doubled


def in_place_use_of_a_view(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    doubled = weight * 2
    functional.relu(doubled.view(-1)[5:], True)
    return x @ doubled


def written_buffer(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    buffer.add_(1)
    return x @ (buffer * 2)


def written_after(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    result = x @ (buffer * 2)
    buffer.t().mul_(1.5)
    return result


def renormalized(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    rows = functional.embedding(torch.arange(50), weight, max_norm=1.0)
    return x @ (rows * 2).t() + weight.sum()


LEFT: dict[str, Callable[..., Any]] = {
    "returned": lambda x, weight, buffer: (x @ (weight * 2), weight * 2),
    "returned as a view": lambda x, weight, buffer: (x, (weight * 2).view(-1)[3:]),
    "used and returned as a view": lambda x, weight, buffer: [
        (x @ made, made.t()) for made in [weight.exp()]
    ],
    "used in place": in_place_use,
    "a view used in place": in_place_use_of_a_view,
    "a buffer that is written": written_buffer,
    "a buffer that is written later": written_after,
    "a table that is written": renormalized,
    "transposed": lambda x, weight, buffer: x @ weight.t(),
    "cast": lambda x, weight, buffer: x.double() @ weight.double(),
    "a copy": lambda x, weight, buffer: x @ weight.t().contiguous(),
    "a part": lambda x, weight, buffer: x @ weight.split(WIDE // 2)[1].t().clone(),
    "small": lambda x, weight, buffer: x * (weight[0] + 1),
    "fused with what reads it": lambda x, weight, buffer: x.sum() * (weight[:40] + 1),
    "no weight": lambda x, weight, buffer: x + torch.arange(WIDE * 100).view(100, WIDE).sin().sum(),
    "a size of the input": lambda x, weight, buffer: x @ (weight * x.shape[0]),
    "all of the input": lambda x, weight, buffer: x @ (weight * x.mean()),
    "one number": lambda x, weight, buffer: x * weight[0, 0],
}
NOT_LEFT = {"a size of the input": 1, "returned": 1}
WRITING = [name for name in LEFT if "written" in name or "in place" in name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level, name", [("O1", n) for n in LEFT] + [("O2", n) for n in WRITING])
def test_what_stays(level: str, name: str) -> None:
    assert_stays(level, Holding(LEFT[name]), [rows()], NOT_LEFT.get(name, 0))


def test_what_stays_beside_other_values() -> None:
    models = {name: Holding(made) for name, made in LEFT.items() if name not in WRITING}
    inputs = [rows() for _ in models]
    assert_stays("O2", Beside(models), inputs, sum(NOT_LEFT.values()))


def assert_stays(level: str, model: nn.Module, inputs: list[Tensor], count: int) -> None:
    again = copy.deepcopy(model)
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs), again(*inputs), rtol=1e-4, atol=1e-4)
    assert_computed_ahead(compiled, count, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_what_the_user_gets_is_the_users(level: str) -> None:
    model, x = Holding(lambda x, weight, buffer: (x @ weight.exp(), weight.exp())), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(3):
            made, expected = compiled(x), model(x)
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
            made[1].zero_()


@pytest.mark.parametrize("level", LEVELS)
def test_random_numbers_are_drawn_in_every_call(level: str) -> None:
    def noisy(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        dropped = functional.dropout(weight, 0.5, training=True)
        return x @ dropped + (buffer + torch.randn_like(buffer)).sum()

    model, x = Holding(noisy), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        assert not torch.allclose(compiled(x), compiled(x))
    assert_computed_ahead(compiled, 0, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_compressed_weights_stay_compressed(level: str) -> None:
    def unpacked(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return functional.linear(x, weight.to(x.dtype) * 0.01)

    weight = torch.randint(-128, 127, (4096, WIDE), dtype=torch.int8)
    model, x = Holding(unpacked, weight), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        same(compiled, model, x)
    assert_computed_ahead(compiled, 0, 1)


def test_no_more_than_the_weights_take() -> None:
    def grown(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return sum(x @ (weight + buffer * i) for i in range(8))

    model, x = Holding(grown), rows()
    with torch.no_grad():
        compiled = compile_at("O2", model)
        same(compiled, model, x)
    (row,) = region(compiled)
    assert row["packed_bytes"] <= 2 * WIDE * WIDE * 4


@pytest.mark.parametrize("level", LEVELS)
def test_parts_of_one_computation(level: str) -> None:
    def parted(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        one, other = (weight * 2).split(WIDE // 2)
        variance, mean = torch.var_mean(torch.cat([weight, buffer, weight]), dim=1)
        return x @ one.t() + x @ other.t() + variance.sum() * mean.sum()

    model, x = Holding(parted), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    assert_computed_ahead(compiled, 2, 2)


# --- around the call ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_inference_tensors(level: str) -> None:
    """They have no version counter, so that what is made of them is made in every call."""
    x = rows()
    with torch.inference_mode():
        model = Scaled()
        compiled = compile_at(level, model)
        for _ in range(2):
            same(compiled, model, x)
            model.weight.data.view(-1)[7] += 100
    assert not fallbacks_of(compiled)


@pytest.mark.parametrize("level", LEVELS)
def test_ordinary_weights_under_inference_mode(level: str, computed: list[int]) -> None:
    model, x = Scaled(), rows()
    compiled = compile_at(level, model)
    with torch.inference_mode():
        for _ in range(3):
            same(compiled, model, x)
    assert len(computed) == 1
    assert_computed_ahead(compiled, 1, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_around_it(level: str, computed: list[int]) -> None:
    model, x = Adapted().eval(), rows()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled = compile_at(level, model)
        for times in (1, 2):
            for _ in range(2):
                made, expected = compiled(x), model(x)
                assert made.dtype == expected.dtype == torch.bfloat16
                torch.testing.assert_close(made, expected, rtol=3e-2, atol=3e-1)
            assert len(computed) == times
            model.a.mul_(3)
            model.b.mul_(3)
            torch.clear_autocast_cache()  # eager alone would go on with the old ones
    assert_computed_ahead(compiled, 1, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_within_it(level: str) -> None:
    def cast(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ (weight @ buffer)

    model, x = Holding(cast), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        torch.testing.assert_close(compiled(x), model(x), rtol=5e-2, atol=2.0)
    assert_computed_ahead(compiled, 0, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["positions", "adapter", "weight norm, linear"])
def test_sizes_that_change(name: str, level: str, computed: list[int]) -> None:
    model, x, count = MODELS[name]()
    model.eval()
    with torch.no_grad():
        compiled = compile_at(level, model, dynamic=True)
        for length in (8, 12, 9):
            same(compiled, model, x[:, :length])
    assert len(graph_reports(compiled)) == 1
    assert len(computed) == 1
    assert_computed_ahead(compiled, count, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_several_threads(level: str) -> None:
    model, x = Adapted().eval(), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        expected = compiled(x).clone()
        model.a.mul_(1)
        wrong: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.equal(compiled(x), expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(from_weights, "find", broken)


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_that_cannot_be_read(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_planning(monkeypatch)
    model, x = Adapted().eval(), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        same(compiled, model, x)
    assert_computed_ahead(compiled, 0, 1)
    (report,) = graph_reports(compiled)
    assert any("planted" in note for note in report.notes)


@pytest.mark.parametrize("level", LEVELS)
def test_values_that_cannot_be_computed(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(from_weights._Values, "_computed", broken)
    model, x = Adapted().eval(), rows()
    with torch.no_grad():
        compiled = compile_at(level, model)
        with pytest.warns(kernel_dispatch.UnifiedWarning, match="planted"):
            same(compiled, model, x)
        same(compiled, model, x)
    assert len(fallbacks_of(compiled)) == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("forgotten", ["model", "everything"])
def test_values_go(forgotten: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    compute = from_weights._Values._computed

    def watching(self: Any, weights: Any) -> Any:
        values = compute(self, weights)
        made.extend(map(weakref.ref, values))
        return values

    monkeypatch.setattr(from_weights._Values, "_computed", watching)
    model, x = Adapted().eval(), rows()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    compiled = compile_at(level, call)
    with torch.no_grad():
        compiled(model, x)
    assert [one() is not None for one in made] == [True]
    if forgotten == "model":
        del model
    else:
        torch.compiler.reset()
    gc.collect()
    assert [one() for one in made] == [None]


# --- whole models ---------------------------------------------------------------------------------


def deberta() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        relative_attention=True,
        position_buckets=32,
        max_position_embeddings=64,
        pos_att_type=["p2c", "c2p"],
        initializer_range=0.15,
    )
    return DebertaV2Model(config), {"input_ids": torch.randint(0, 100, (1, 24))}


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=56, embed_dim=32, depths=[2, 1], num_heads=[2, 4], initializer_range=0.15
    )
    return SwinModel(config), {"pixel_values": torch.randn(1, 3, 56, 56)}


def bit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BitConfig, BitModel

    config = BitConfig(
        embedding_size=32,
        hidden_sizes=[64],
        depths=[1],
        num_groups=8,
        layer_type="bottleneck",
    )
    return BitModel(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def wav2vec2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        initializer_range=0.15,
    )
    return Wav2Vec2Model(config), {"input_values": torch.randn(1, 2000)}


WHOLE: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], int]] = {
    "deberta": (deberta, 2),
    "swin": (swin, 3),
    "bit": (bit, 4),
    "wav2vec2": (wav2vec2, 1),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models(name: str, level: str) -> None:
    build, least = WHOLE[name]
    model, inputs = build()
    model.eval()
    with torch.no_grad():
        compiled = compile_at(level, model)
        for _ in range(2):
            made, expected = compiled(**inputs)[0], model(**inputs)[0]
            torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)
    assert_ran_as_planned(compiled, level)
    (row,) = region(compiled)
    assert row["count"] >= least
    assert row["runs"] == 2 * row["count"]
