"""The verification before the timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernel_dispatch.bench.building import fingerprint
from kernel_dispatch.bench.checking import Bound, Truth, WrongResult, check, establish
from kernel_dispatch.bench.stepping import Step
from kernel_dispatch.bench.workload import Case

pytestmark = pytest.mark.quick


def step(fn: Callable[..., Any], *args: Any, training: bool = False) -> Step:
    return Step(Case(fn, args), training)


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 3).eval()


def test_the_reference_is_in_float64_and_the_case_is_left_alone() -> None:
    model, x = linear(), torch.randn(4, 8)
    truth = establish(step(model, x))
    assert truth.reference is not None and truth.reference[0].dtype == torch.float64
    assert truth.baseline[0].dtype == torch.float32
    assert truth.errors[0] < 1e-6
    assert {p.dtype for p in model.parameters()} == {torch.float32} and x.dtype == torch.float32
    found = check(model(x), truth, Bound())
    assert found is not None and 0 < found.error <= found.baseline_error < found.allowed


def test_a_truth_is_the_same_from_a_file(tmp_path: Any) -> None:
    truth = establish(step(linear(), torch.randn(4, 8)))
    truth.save(str(tmp_path / "truth.pt"))
    loaded = Truth.load(str(tmp_path / "truth.pt"))
    assert torch.equal(loaded.baseline[0], truth.baseline[0])
    assert (loaded.note, loaded.random, loaded.repeatable) == ("", False, True)


def test_training_gives_outputs_and_gradients_and_leaves_no_old_gradient_behind() -> None:
    model, x = linear(), torch.randn(4, 8)
    training = step(model, x, training=True)
    first = training.run()
    second = training.run()
    _, gradients = first
    assert len(gradients) == 2 and gradients[0].shape == model.weight.shape
    assert torch.equal(gradients[0], second[1][0]), "not added up over the calls"
    assert model.training and x.grad is None


def test_training_a_function_gives_gradients_of_its_inputs() -> None:
    x = torch.randn(4)
    _, gradients = step(lambda x: x.sin(), x, training=True).run()
    assert gradients[0].shape == (4,) and bool(gradients[0].ne(0).all())


def test_gradients_are_judged_together_and_a_wrong_one_is_seen() -> None:
    training = step(linear(), torch.randn(4, 8), training=True)
    truth = establish(training)
    assert truth.gradients == 2
    outputs, gradients = training.run()
    found = check([outputs, gradients], truth, Bound())
    assert found is not None and found.error <= found.allowed < 1e-5
    for wrong in (gradients[0] * 1.001, gradients[0] * float("nan")):
        with pytest.raises(WrongResult, match="gradients: error"):
            check([outputs, [wrong, gradients[1]]], truth, Bound())
    with pytest.raises(WrongResult, match="2 output tensors, eager has 3"):
        check([outputs, gradients[:1]], truth, Bound())


def test_training_without_anything_to_train_is_refused() -> None:
    frozen = linear().requires_grad_(False)
    for case in (
        step(frozen, torch.randn(4, 8), training=True),
        step(lambda x: x + 1, torch.arange(3), training=True),
    ):
        with pytest.raises(RuntimeError, match="nothing in its outputs requires a gradient"):
            case.run()


def test_random_and_stateful_cases_are_told_apart() -> None:
    assert establish(step(torch.rand_like, torch.ones(5))).random
    state = establish(step(lambda x: x.add_(1).clone(), torch.ones(5)))
    assert not state.random and not state.repeatable
    assert torch.equal(state.baseline[0], torch.full((5,), 2.0))


def test_without_float64_eager_is_the_reference() -> None:
    inner = linear()  # out of sight: it stays in float32

    truth = establish(step(lambda x: inner(x), torch.randn(4, 8)))
    assert truth.reference is None and "no float64 reference (RuntimeError" in truth.note
    check([truth.baseline[0] + 1e-6], truth, Bound())
    with pytest.raises(WrongResult, match="output 0: error"):
        check([truth.baseline[0] * 1.01], truth, Bound())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out: out * 1.001, "output 0: error 1.0e-03 against float64, allowed"),
        (lambda out: out[:2], r"output 0: shape torch.Size\(\[2, 3\]\), eager has"),
        (lambda out: out.double(), "output 0: dtype torch.float64, eager has torch.float32"),
        (lambda out: (out, out), "2 output tensors, eager has 1"),
        (lambda out: out.log(), "output 0: NaN where eager has none"),
        (lambda out: None, "0 output tensors, eager has 1"),
    ],
)
def test_a_wrong_output_is_told_in_one_line(change: Callable[..., Any], text: str) -> None:
    model, x = linear(), torch.randn(4, 8)
    truth = establish(step(model, x))
    with torch.no_grad(), pytest.raises(WrongResult, match=text) as raised:
        check(change(model(x)), truth, Bound())
    assert "\n" not in str(raised.value)


def test_a_tolerance_allows_what_the_contract_does_not() -> None:
    model, x = linear(), torch.randn(4, 8)
    truth = establish(step(model, x))
    with torch.no_grad():
        found = check(model(x) * 1.005, truth, Bound(tolerance=1e-2))
        assert found is not None and found.allowed == 1e-2
        with pytest.raises(WrongResult):
            check(model(x) * 1.02, truth, Bound(tolerance=1e-2))


def test_tensors_in_a_dataclass_are_verified_too() -> None:
    @dataclass
    class Output:
        hidden: torch.Tensor
        name: str = "x"

    truth = establish(step(lambda x: (x + 1, Output(x * 2)), torch.randn(4)))
    assert len(truth.baseline) == 2


def test_integers_must_be_equal() -> None:
    truth = establish(step(lambda x: x + 1, torch.arange(5)))
    check(torch.arange(1, 6), truth, Bound())
    with pytest.raises(WrongResult, match="output 0: 1 of 5 values differ from eager"):
        check(torch.tensor([1, 2, 3, 4, 6]), truth, Bound())


def test_fingerprints_tell_bits_order_and_shape_apart() -> None:
    x = torch.randn(6)
    same = fingerprint([x, torch.tensor(True)])
    assert same == fingerprint([x.clone(), torch.tensor(True)])
    others = [
        [x.flip(0), torch.tensor(True)],
        [x.view(2, 3), torch.tensor(True)],
        [x + 1e-6, torch.tensor(True)],
        [x, torch.tensor(False)],
        [torch.tensor(True), x],
        [x.to(torch.complex64), torch.tensor(True)],
        [],
    ]
    assert same not in [fingerprint(one) for one in others]
