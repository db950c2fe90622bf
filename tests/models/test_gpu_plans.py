"""Models planned and lowered for GPUs that are not here: every region, by count, and the numbers.

What was lowered runs here on the CPU, where operators of ours compute their plain meaning: that the
graph still computes the model is proved, that the kernels do is for tests/kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernel_dispatch import dry_running
from kernel_dispatch.imagined_devices import parse_device
from kernel_dispatch.numerics import double_by_default, to_reference
from kernel_dispatch.planned_graphs import DryRun
from kernel_dispatch.settings import resolve
from lowering.capability import GRAPH
from lowering.targets import cuda, rocm
from tests.models import zoo
from tests.support.gpu_plans import lowered
from tests.support.numerics import assert_contract

pytestmark = pytest.mark.slow

DEVICES = ["cuda:sm80", "cuda:sm90", "rocm:gfx942"]
LEVELS = ["O1", "O2", "O3"]
Regions = dict[tuple[str, str], int]
Tensor = torch.Tensor

# region -> how many there are in an inference graph of the model
INFERENCE: dict[str, dict[str, int]] = {
    "encoder": {"attention": 2, "cross_entropy": 1, "linear": 14, "norm": 5, "embedding": 3},
    "decoder": {
        "attention": 2,
        "cross_entropy": 1,
        "linear": 15,
        "rope": 2,
        "norm": 5,
        "gated": 2,
        "embedding": 1,
    },
    "vision_transformer": {
        "attention": 2,
        "cross_entropy": 1,
        "convolution": 1,
        "linear": 13,
        "norm": 5,
    },
    "cnn": {"cross_entropy": 1, "convolution": 10, "linear": 1},
    "mixture_of_experts": {
        "attention": 2,
        "cross_entropy": 1,
        "linear": 11,
        "rope": 2,
        "norm": 5,
        "gated": 2,
        "embedding": 1,
    },
    "qwen3": {"attention": 2, "linear": 15, "rope": 2, "norm": 9, "gated": 2, "embedding": 1},
}


def qwen3() -> Qwen3ForCausalLM:
    """Norms of the heads before the rotation, which the other models do not have."""
    config = Qwen3Config(
        vocab_size=zoo.VOCABULARY,
        hidden_size=zoo.HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        initializer_range=zoo.SPREAD,
        use_cache=False,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def case(name: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    if name == "qwen3":
        return qwen3(), {"input_ids": torch.randint(0, zoo.VOCABULARY, (2, 8))}
    entry = zoo.BY_NAME[name]
    return entry.model(), entry.batch(0)


def in_half(value: Any) -> Any:
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def provider_of(region: str, device: str, level: str) -> str:
    """Who has to take it, by the words of the capability table's limits."""
    if region == "attention":
        return "cudnn" if device == "cuda:sm90" else "mha"
    if region == "convolution":
        return "cudnn" if device.startswith("cuda") else "inductor"
    return "inductor"


def at_o1(region: str, device: str) -> bool:
    return region == "attention" or (region == "convolution" and device.startswith("cuda"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", INFERENCE)
def test_every_region_is_planned_as_the_table_says(name: str) -> None:
    model, inputs = case(name)
    model, inputs = model.bfloat16(), {key: in_half(value) for key, value in inputs.items()}
    with torch.no_grad():
        told = dry_runs(model, inputs)
        torch._dynamo.reset()
        whole = dry_running.dry_run(model, (), inputs, device="cuda:sm90", options={"level": "O2"})
    for device, level in itertools.product(DEVICES, LEVELS):
        one = told[device, level]
        wanted: Regions = {
            (region, provider_of(region, device, level)): count
            for region, count in INFERENCE[name].items()
            if level != "O1" or at_o1(region, device)
        }
        assert one.regions() == wanted, (device, level, str(one))
        assert not [graph.error for graph in one.graphs if graph.error]
    assert whole.regions() == told["cuda:sm90", "O2"].regions()
    assert not [graph.error for graph in whole.graphs if graph.error]


def dry_runs(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[tuple[str, str], DryRun]:
    """For every device and level what `dry_run` tells, of one capture: that takes half the time."""
    told = {at: DryRun(*at, []) for at in itertools.product(DEVICES, LEVELS)}

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        for (device, level), one in told.items():
            settings = resolve(None, {"level": level})
            imagined = parse_device(device)
            one.graphs.append(dry_running.planned(gm, example_inputs, settings, imagined))
        return gm.forward

    torch.compile(model, backend=backend)(**inputs)
    return told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["decoder", "cnn", "qwen3"])
def test_what_was_lowered_still_computes_the_model(name: str, training: bool) -> None:
    model, inputs = case(name)
    inputs.setdefault("labels", inputs.get("input_ids", torch.zeros(1)))
    compiled, backend = lowered(model, "cuda:sm90")

    def run(module: Any, given: Any) -> Any:
        with torch.set_grad_enabled(training):
            out = module(**given)
        found = [out.loss, out.logits]
        if training:
            weights = [p for p in module.parameters() if p.requires_grad]
            found += torch.autograd.grad(out.loss, weights, allow_unused=True)
        return [tensor.detach() for tensor in found if tensor is not None]

    got, own = run(compiled, inputs), run(model, inputs)
    with double_by_default():
        truth = run(model.double(), to_reference(inputs))
    assert_contract(got, own, truth, name)
    assert backend.graphs[0].regions


@pytest.mark.parametrize("target", [cuda.TARGET, rocm.TARGET], ids=lambda target: target.name)
def test_every_row_says_why(target: Any) -> None:
    assert all(row.why for row in target.rows)
    assert {row.provider for row in target.rows if row.region == GRAPH} == {"inductor", "eager"}
