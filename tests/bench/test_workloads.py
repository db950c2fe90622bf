"""Are the workloads fit to be compared on: alive, repeatable, within float32, one graph each?"""

from __future__ import annotations

import copy
import hashlib
import re
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.workloads import CORE, WORKLOADS
from benchmarks.workloads.encoder_decoder import RelativePositions
from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.llama import SMALL, Llama
from benchmarks.workloads.mixture_of_experts import SMALL as SMALL_MIXTURE
from benchmarks.workloads.mixture_of_experts import Experts
from benchmarks.workloads.state_space import scan
from kernel_dispatch.bench import Case
from kernel_dispatch.bench.workload import GROUPS

ROOT = Path(__file__).parents[2]
PLAIN = [name for name, workload in WORKLOADS.items() if not workload.needs]
ONE_GRAPH = [name for name in PLAIN if name != "graph-break"]
TRAINED = [name for name, workload in WORKLOADS.items() if workload.trains]
# An empty output, and outputs that are single numbers.
WITHOUT_SPREAD = ("empty-tensor", "scalar-reduction", "cross-entropy")
FLOAT32_ERROR = 1e-4  # of the largest value, against float64
GRADIENT_ERROR = 1e-2  # of the largest value; of rounding noise it would be about one
SHORTEST_SUMMARY = 10
# The grouped product of its experts takes no float64.
WITHOUT_DOUBLE = ("hf-mixtral",)
LEAST_VARIETY = 0.1  # of the rows of an output, as a share of its spread
# Under this share of its own spread an output hardly knows its inputs.
LEAST_CHANGE = 0.01


def small(name: str, seed: int = 0) -> Case:
    """The workload with small sizes; those of the overhead group are small as they are."""
    workload = WORKLOADS[name]
    if workload.missing():
        pytest.skip(workload.missing())
    torch.manual_seed(seed)
    return workload.build() if workload.group == "overhead" else workload.build(small=True)


def full(name: str, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    return WORKLOADS[name].build()


def outputs(case: Case, args: tuple[torch.Tensor, ...] | None = None) -> list[torch.Tensor]:
    with torch.no_grad():
        result = case.fn(*(case.args if args is None else args), **case.kwargs)
    return [leaf.clone() for leaf in pytree.tree_leaves(result)]


def in_double(case: Case) -> Case:
    fn = copy.deepcopy(case.fn)
    if isinstance(fn, torch.nn.Module):
        fn = fn.double()
    return Case(fn, tuple(x.double() if x.is_floating_point() else x for x in case.args))


def float32_error(case: Case, found: list[torch.Tensor]) -> float:
    pairs = zip(found, outputs(in_double(case)), strict=True)
    errors = [
        float((got - exact).abs().max() / exact.abs().max())
        for got, exact in pairs
        if got.is_floating_point() and got.numel()
    ]
    return max(errors, default=0.0)


def assert_alive(found: list[torch.Tensor]) -> None:
    """Finite, neither faded nor exploded, and not the same in every row."""
    for output in found:
        if not output.is_floating_point():
            continue
        assert output.isfinite().all()
        assert 1e-2 < output.std() < 1e2
        rows = output.flatten(0, -2) if output.dim() > 1 else output[None]
        if len(rows) > 1:
            assert rows.std(0).mean() > LEAST_VARIETY * output.std()


def assert_depends_on_inputs(case: Case, other: Case, found: list[torch.Tensor]) -> None:
    """Each input by itself changes an output."""
    for index, (mine, others) in enumerate(zip(case.args, other.args, strict=True)):
        if torch.equal(mine, others):
            continue
        args = (*case.args[:index], others, *case.args[index + 1 :])
        changes = [
            float((now - then).float().norm() / (then.float() - then.float().mean()).norm())
            for now, then in zip(outputs(case, args), found, strict=True)
        ]
        assert max(changes) > LEAST_CHANGE, f"input {index}"


def fingerprint(case: Case) -> str:
    return digest_of(outputs(case))


def digest_of(found: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for output in found:
        digest.update(output.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.quick
def test_names_are_unique_and_made_of_lower_case_words() -> None:
    assert all(name == workload.name for name, workload in WORKLOADS.items())
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in WORKLOADS)
    builders = [workload.build for workload in WORKLOADS.values()]
    assert len(set(builders)) == len(builders)


@pytest.mark.quick
def test_summaries_tell_the_sizes() -> None:
    for workload in WORKLOADS.values():
        assert len(workload.summary) > SHORTEST_SUMMARY, workload.name
        assert re.search(r"\d", workload.summary), workload.name
        assert workload.group in GROUPS


@pytest.mark.quick
def test_the_core_set_is_of_models_that_need_torch_only() -> None:
    assert len(set(CORE)) == len(CORE) > 0
    assert all(WORKLOADS[name].group == "model" and not WORKLOADS[name].needs for name in CORE)


def test_importing_the_workloads_imports_no_compiler_and_no_transformers(python) -> None:
    script = """
import sys
import benchmarks.workloads
print({"transformers", "torch._dynamo"} & {*sys.modules})
"""
    assert python(script, PYTHONPATH=str(ROOT)).stdout.strip() == "set()"


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in PLAIN if name not in WITHOUT_SPREAD])
def test_outputs_are_alive(name: str) -> None:
    assert_alive(outputs(small(name)))


@pytest.mark.parametrize("name", [name for name in WORKLOADS if WORKLOADS[name].needs])
def test_outputs_of_transformers_are_alive(name: str) -> None:
    assert_alive(outputs(small(name)))


@pytest.mark.quick
def test_an_empty_tensor_and_single_numbers() -> None:
    assert [output.shape for output in outputs(small("empty-tensor"))] == [(0, 16)]
    for name in ("scalar-reduction", "cross-entropy"):
        (value,) = outputs(small(name))
        assert value.shape == () and 1e-2 < value < 1e2


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "empty-tensor"])
def test_outputs_depend_on_every_input(name: str) -> None:
    case = small(name)
    assert_depends_on_inputs(case, small(name, seed=1), outputs(case))


@pytest.mark.parametrize("name", WORKLOADS)
def test_built_twice_and_called_twice_it_gives_the_same_bits(name: str) -> None:
    case = small(name)
    first = fingerprint(case)
    assert fingerprint(case) == first
    assert fingerprint(small(name)) == first


SECOND_PROCESS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads({{threads}})
from tests.bench import test_workloads as here
for name in {{names}}:
    print(name, here.fingerprint(here.{{build}}(name)))
"""


def assert_same_in_second_process(
    python, names: list[str], build: str, here: dict[str, str]
) -> None:
    """`here` has what is known already of this process."""
    script = SECOND_PROCESS.format(threads=torch.get_num_threads(), names=names, build=build)
    there = dict(line.split() for line in python(script).stdout.splitlines())
    missing = {name for name in names if name not in here}
    assert there == here | {name: fingerprint(globals()[build](name)) for name in missing}


def test_a_second_process_builds_the_same(python) -> None:
    assert_same_in_second_process(python, PLAIN, "small", {})


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in WITHOUT_DOUBLE])
def test_float32_is_close_to_float64(name: str) -> None:
    case = small(name)
    assert float32_error(case, outputs(case)) < FLOAT32_ERROR


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_dynamo_captures_one_graph(name: str) -> None:
    case = small(name)
    with torch.no_grad():
        compiled = torch.compile(
            case.fn, fullgraph=True, backend="unified", options={"level": "O0"}
        )
        got = pytree.tree_leaves(compiled(*case.args))
    for one, other in zip(got, outputs(case), strict=True):
        torch.testing.assert_close(one, other)


def test_the_graph_break_is_one() -> None:
    case = small("graph-break")
    assert torch._dynamo.explain(case.fn)(*case.args).graph_count > 1


def gradients(case: Case) -> dict[str, torch.Tensor | None]:
    """Of the parameters, or of the floating inputs of a case without any; in train mode."""
    trained = {f"input {i}": x for i, x in enumerate(case.args) if x.is_floating_point()}
    if isinstance(case.fn, torch.nn.Module):
        case.fn.train()
        trained = dict(case.fn.named_parameters()) or trained
    trained = {name: x for name, x in trained.items() if x.requires_grad or "input" in name}
    for leaf in trained.values():
        leaf.requires_grad_()
    results = [x for x in pytree.tree_leaves(case.fn(*case.args)) if x.requires_grad]
    torch.manual_seed(0)
    torch.autograd.backward(results, [torch.randn(x.shape).to(x.dtype) for x in results])
    return {name: leaf.grad for name, leaf in trained.items()}


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in WITHOUT_DOUBLE])
def test_every_weight_gets_a_gradient_that_is_no_rounding_noise(name: str) -> None:
    case = small(name)
    exact = gradients(in_double(case))
    for parameter, gradient in gradients(case).items():
        assert gradient is not None, parameter
        assert gradient.isfinite().all() and gradient.any(), parameter
        error = (gradient - exact[parameter]).abs().max() / exact[parameter].abs().max()
        assert error < GRADIENT_ERROR, parameter


@pytest.fixture(scope="module")
def full_size() -> dict[str, str]:
    """Fingerprints of the core set, as far as this process has run it: that takes seconds each."""
    return {}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_the_core_set_in_full_size(name: str, full_size: dict[str, str]) -> None:
    case = full(name)
    found = outputs(case)
    full_size[name] = digest_of(found)
    assert_alive(found)
    assert_depends_on_inputs(case, full(name, seed=1), found)
    assert float32_error(case, found) < FLOAT32_ERROR


@pytest.mark.slow
def test_a_second_process_builds_the_same_core_set_in_full_size(
    python, full_size: dict[str, str]
) -> None:
    assert_same_in_second_process(python, list(CORE), "full", full_size)


@pytest.mark.quick
def test_the_scan_by_doubling_is_the_loop() -> None:
    decay, update = torch.rand(2, 13, 3), torch.randn(2, 13, 3)
    state, states = torch.zeros(2, 3), []
    for time in range(13):
        state = decay[:, time] * state + update[:, time]
        states.append(state)
    torch.testing.assert_close(scan(decay, update), torch.stack(states, dim=1))


@pytest.mark.quick
@torch.no_grad()
def test_llama_decodes_what_it_would_say_after_a_prompt() -> None:
    prompt = draw(Llama(SMALL))
    decoder = draw(Llama(SMALL, SMALL.cache))
    decoder.load_state_dict({**decoder.state_dict(), **prompt.state_dict(), **_tables(decoder)})
    tokens = torch.randint(SMALL.vocabulary, (1, SMALL.tokens))
    for position in range(SMALL.tokens):
        said = decoder(tokens[:, position : position + 1], torch.tensor([position]))
    torch.testing.assert_close(said, prompt(tokens))


def _tables(model: Llama) -> dict[str, torch.Tensor]:
    """The decoder's own: it has as many positions as its cache."""
    return {f"rotary.{name}": buffer for name, buffer in model.rotary.named_buffers()}


@pytest.mark.quick
@torch.no_grad()
def test_the_experts_are_those_that_the_router_chose() -> None:
    experts = draw(Experts(SMALL_MIXTURE))
    x = torch.randn(1, 5, SMALL_MIXTURE.width)
    expected = []
    for token in x[0]:
        best, chosen = experts.router(token).topk(SMALL_MIXTURE.chosen)
        answers = []
        for expert in chosen:
            gate, up = (token @ experts.gate_up[expert]).chunk(2)
            answers.append((torch.nn.functional.silu(gate) * up) @ experts.down[expert])
        expected.append(best.softmax(0) @ torch.stack(answers))
    torch.testing.assert_close(experts(x), torch.stack(expected)[None])


@pytest.mark.parametrize("both_ways", [True, False])
def test_relative_positions_fall_into_the_buckets_of_t5(both_ways: bool) -> None:
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(-300, 300)
    theirs = attention._relative_position_bucket(distance, bidirectional=both_ways)
    assert torch.equal(RelativePositions(4, both_ways)._bucket(distance), theirs)
