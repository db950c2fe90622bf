"""Real architectures through `unified`: outputs, gradients, generation, recompiles, the report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import PreTrainedModel, StaticCache

from kernel_dispatch.numerics import all_in_double, to_reference
from tests.models.zoo import BY_NAME, ENTRIES, Entry, Inputs, outputs
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.numerics import assert_bit_identical, assert_contract
from tests.support.reports import assert_ran_as_planned

pytestmark = pytest.mark.slow

LEVELS = ("O0", "O1", "O2")
AUTOTUNED = ("decoder", "cnn")  # O3 takes long, so for two of the models
SEEDS = (1, 2, 3)
PROMPT = 8
NEW_TOKENS = 32

every_model = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
every_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    _forget_graphs()
    with size_limits_lifted():  # regions of a tiny model are tiny, and would all stay with eager
        yield
    torch._dynamo.reset()


@every_model
def test_model_is_not_degenerate(entry: Entry) -> None:
    result = _training_step(entry.model().train(), entry.batch(SEEDS[0]))
    logits = result["logits"]
    assert 0.1 < logits.std().item() < 20
    spread = (logits - logits[:1]).abs().amax(0)
    assert spread.max().item() > 0.1, "the two examples of the batch give the same"
    assert 0.1 < result["loss"].item() < 50
    other = _inference(entry.model(), entry.batch(SEEDS[1]))["logits"]
    assert not torch.allclose(logits, other, atol=0.01)
    for name, gradient in result["gradients"].items():
        if not name.endswith(entry.null_gradients or "-"):
            assert gradient.abs().max().item() > 1e-4, name


@pytest.mark.sampled(4)
@every_level
@every_model
def test_outputs(entry: Entry, level: str) -> None:
    _check_outputs(entry, level)


@pytest.mark.parametrize("name", AUTOTUNED)
def test_outputs_at_o3(name: str) -> None:
    _check_outputs(BY_NAME[name], "O3")


@pytest.mark.sampled(6)
@every_level
@every_model
def test_training_step(entry: Entry, level: str) -> None:
    if entry.untraceable_backward and level != "O0":
        pytest.skip(entry.untraceable_backward)
    model = entry.model().train()
    eager, reference = _trained_baseline(entry, traced=level == "O0" and entry.asks_if_traced)
    _forget_graphs()
    compiled = compile_at(level, model)
    candidate = _training_step(model, entry.batch(SEEDS[0]), compiled)
    for name in eager["gradients"]:
        if name.endswith(entry.null_gradients or "-"):
            largest = max(g.abs().max().item() for g in eager["gradients"].values())
            assert candidate["gradients"].pop(name).abs().max().item() < 1e-5 * largest, name
    _check(level, candidate, *(_without_null(entry, tree) for tree in (eager, reference)))
    assert_ran_as_planned(compiled, level)
    graphs = [_graphs()]
    for seed in SEEDS[1:]:
        model.zero_grad()
        _training_step(model, entry.batch(seed), compiled)
        graphs.append(_graphs())
    assert len(set(graphs)) == 1, f"graphs after each step: {graphs}"


@every_level
def test_greedy_generation_with_a_static_cache(level: str) -> None:
    model = BY_NAME["decoder"].model()
    eager_tokens, eager_logits, _ = _generate(model, model)
    best = eager_logits.topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).min().item()
    assert margin > 1e-4, "eager itself is near a tie: choose another seed for the weights"
    assert eager_tokens.unique().numel() > NEW_TOKENS // 4, "the text repeats itself"
    with all_in_double():
        wide = _wide(copy.deepcopy(model))
        _, reference, _ = _generate(wide, wide)
    if level == "O0":  # attention asks whether it is traced, see Entry.asks_if_traced
        _, eager_logits, _ = _generate(model, torch.compile(model, backend="eager"))
        _forget_graphs()
    compiled = compile_at(level, model)
    tokens, logits, graphs = _generate(model, compiled)
    assert tokens.tolist() == eager_tokens.tolist()
    _check(level, logits, eager_logits, reference)
    assert len(set(graphs[2:])) == 1, f"graphs after each step: {graphs}"
    assert_ran_as_planned(compiled, level)


def _check_outputs(entry: Entry, level: str) -> None:
    traced = level == "O0" and entry.asks_if_traced
    baselines = {seed: _baseline(entry, seed, traced) for seed in SEEDS}
    _forget_graphs()
    compiled = compile_at(level, entry.model())
    graphs, together = [], []
    for seed in SEEDS:
        candidate = _inference(compiled, entry.batch(seed))
        eager, reference = baselines[seed]
        # The rounding of one number is luck, so single ones are judged together.
        together.append([_numbers(tree) for tree in (candidate, eager, reference)])
        _check(level, *map(_without_numbers, (candidate, eager, reference)))
        graphs.append(_graphs())
    for name in together[0][0]:
        _check(
            level,
            *(torch.stack([one[name] for one in each]) for each in zip(*together, strict=True)),
        )
    assert len(set(graphs)) == 1, f"graphs after each call: {graphs}"
    assert_ran_as_planned(compiled, level)


def _numbers(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tree.items() if value.dim() == 0}


def _without_numbers(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tree.items() if value.dim() != 0}


def _check(level: str, candidate: Any, eager: Any, reference: Any) -> None:
    if level == "O0":
        assert_bit_identical(candidate, eager, level)
    else:
        assert_contract(candidate, eager, reference, level)


def _forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _inference(model: Callable[..., Any], batch: Inputs) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return outputs(model(**batch))


def _training_step(
    model: PreTrainedModel, batch: Inputs, call: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Outputs, the gradient of every parameter, and the buffers that the step wrote."""
    result = outputs((model if call is None else call)(**batch))
    result["loss"].backward()
    return {name: tensor.detach() for name, tensor in result.items()} | {
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
        "buffers": _statistics(dict(model.named_buffers())),
    }


def _statistics(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A running mean near zero is a difference of large numbers: its error is measured on the
    scale of what was averaged, so it goes together with the spread."""
    result = {name: buffer.clone() for name, buffer in buffers.items()}
    for name in [name for name in result if name.endswith("running_mean")]:
        variance = result[name.replace("running_mean", "running_var")]
        result[name] = torch.stack([result[name], variance.sqrt()])
    return result


@cache
def _baseline(entry: Entry, seed: int, traced: bool) -> tuple[Any, Any]:
    """Eager's outputs and the float64 reference."""
    batch, model = entry.batch(seed), entry.model()
    eager = _inference(torch.compile(model, backend="eager") if traced else model, batch)
    wide = _wide(entry.model())  # built here: within all_in_double it would draw other weights
    with all_in_double():
        reference = _inference(wide, to_reference(batch))
    return _sane(eager, reference)


@cache
def _trained_baseline(entry: Entry, traced: bool) -> tuple[Any, Any]:
    batch, model = entry.batch(SEEDS[0]), entry.model().train()
    eager = _training_step(model, batch, torch.compile(model, backend="eager") if traced else model)
    wide = _wide(entry.model().train())
    with all_in_double():
        reference = _training_step(wide, to_reference(batch))
    _sane(eager["logits"], reference["logits"])
    return eager, reference


def _sane(eager: Any, reference: Any) -> tuple[Any, Any]:
    """A reference of another model would make eager's error large, and the bound with it."""
    errors = assert_contract(eager, eager, reference, "eager against the reference")
    assert all(error.eager < 1e-4 for error in errors), errors
    return eager, reference


def _wide(model: PreTrainedModel) -> PreTrainedModel:
    model.set_experts_implementation("eager")  # torch's grouped product has no float64 kernel
    return model.double()


def _without_null(entry: Entry, tree: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: gradient
        for name, gradient in tree["gradients"].items()
        if not name.endswith(entry.null_gradients or "-")
    }
    return tree | {"gradients": kept}


def _generate(
    model: PreTrainedModel, step: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Greedy tokens, the logits behind each, and the number of graphs after each step."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=generator)
    cache = StaticCache(model.config, max_cache_len=PROMPT + NEW_TOKENS)
    tokens, logits, graphs = [], [], []
    with torch.no_grad():
        result = model(input_ids=prompt, past_key_values=cache, use_cache=True)
        for _ in range(NEW_TOKENS):
            logits.append(result.logits[:, -1].clone())
            tokens.append(logits[-1].argmax(-1, keepdim=True))
            result = step(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
            graphs.append(_graphs())
    return torch.cat(tokens, dim=1), torch.cat(logits), graphs
