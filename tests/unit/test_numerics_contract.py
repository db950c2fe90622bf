"""The judge is judged: each kind of wrong output is planted and must be caught."""

from __future__ import annotations

import pytest
import torch

from kernel_dispatch.numerics import all_in_double, measure, to_reference
from tests.support.numerics import assert_bit_identical, assert_contract, assert_same_form

pytestmark = pytest.mark.quick


@pytest.fixture
def values() -> torch.Tensor:
    return torch.linspace(-2.0, 3.0, 24).reshape(4, 6)


def compute(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"sine": torch.sin(x), "index": x.argmax(dim=1), "softmax": x.softmax(dim=1)}


def judge(candidate: object, x: torch.Tensor) -> None:
    assert_contract(candidate, compute(x), compute(to_reference(x)), "planted")


def test_eager_keeps_its_own_contract(values: torch.Tensor) -> None:
    judge(compute(values), values)


def test_rounding_of_the_last_bit_is_allowed(values: torch.Tensor) -> None:
    candidate = compute(values)
    candidate["sine"] = torch.sin(values.double()).float().nextafter(torch.tensor(9.0))
    judge(candidate, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_planted_error_is_caught(dtype: torch.dtype) -> None:
    eager = torch.linspace(1, 2, 10).to(dtype)
    wrong = eager.clone()
    wrong[7] += 1e-3
    with pytest.raises(AssertionError, match=r"breaks the numerics contract.*worst at \(7,\)"):
        assert_contract(wrong, eager, to_reference(eager), "planted")


def test_an_error_below_the_resolution_of_bfloat16_is_allowed_and_above_is_not() -> None:
    eager = torch.linspace(1, 2, 10).bfloat16()
    assert_contract(eager * 1.008, eager, to_reference(eager), "planted")
    with pytest.raises(AssertionError, match="breaks the numerics contract"):
        assert_contract(eager * 1.1, eager, to_reference(eager), "planted")


def test_an_eager_that_errs_itself_widens_the_bound() -> None:
    reference = torch.ones(3, dtype=torch.float64)
    assert_contract(torch.full((3,), 1.019), torch.full((3,), 1.01), reference, "planted")
    with pytest.raises(AssertionError, match="breaks the numerics contract"):
        assert_contract(torch.full((3,), 1.021), torch.full((3,), 1.01), reference, "planted")


def test_swapped_outputs_are_caught() -> None:
    x = torch.linspace(1, 2, 10)
    pair = (x.sin(), x.cos())
    with pytest.raises(AssertionError, match=r"output \[0\]"):
        assert_contract(pair[::-1], pair, to_reference(pair), "planted")


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_a_special_value_is_caught_on_either_side(values: torch.Tensor, special: float) -> None:
    other = values.clone()
    other[2, 3] = special
    for candidate, eager in ((other, values), (values, other)):
        with pytest.raises(AssertionError, match="elsewhere than eager"):
            assert_contract(candidate, eager, to_reference(eager), "planted")
    assert_contract(other.clone(), other, to_reference(other), "planted")


def test_an_overflow_that_only_the_narrow_type_has_is_not_an_error() -> None:
    eager = torch.tensor([float("inf"), 1.0])
    reference = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert_contract(eager.clone(), eager, reference, "planted")


def test_a_wrong_dtype_is_caught(values: torch.Tensor) -> None:
    candidate = compute(values)
    candidate["softmax"] = candidate["softmax"].double()
    with pytest.raises(AssertionError, match=r"softmax.*dtype torch.float64, eager has torch.fl"):
        judge(candidate, values)


def test_a_wrong_shape_and_a_wrong_structure_are_caught(values: torch.Tensor) -> None:
    candidate = compute(values)
    candidate["sine"] = candidate["sine"].flatten()
    with pytest.raises(AssertionError, match="shape"):
        judge(candidate, values)
    with pytest.raises(AssertionError, match="structure"):
        judge(list(compute(values).values()), values)


def test_a_wrong_integer_is_caught(values: torch.Tensor) -> None:
    candidate = compute(values)
    candidate["index"][1] -= 1
    with pytest.raises(AssertionError, match=r"index.*differs from eager at 1 of 4.*first at \(1"):
        judge(candidate, values)


def test_python_numbers_are_outputs_too() -> None:
    assert_contract((1.5, 3, None), (1.5, 3, None), (1.5, 3, None), "planted")
    with pytest.raises(AssertionError, match=r"output \[1\]"):
        assert_contract((1.5, 4), (1.5, 3), (1.5, 3), "planted")
    with pytest.raises(AssertionError, match=r"output \[0\]"):
        assert_contract((1.501, 3), (1.5, 3), (1.5, 3), "planted")


def test_empty_zero_and_scalar_tensors_have_an_error() -> None:
    empty = torch.empty(0, 3)
    assert_contract(empty, empty.clone(), empty.double(), "planted")
    zeros = torch.zeros(3)
    assert measure(zeros + 1e-3, zeros, zeros.double()).candidate == pytest.approx(1e-3)
    assert measure(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(1.0)).worst_index == ()


def test_bit_identity_tells_signed_zeros_apart_and_not_nans() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other_nan = nan.view(torch.int32).bitwise_xor(torch.tensor([1, 0])).int().view(torch.float32)
    assert_bit_identical(other_nan, nan, "planted")
    with pytest.raises(AssertionError, match=r"not bit-identical to eager at 1 of 2"):
        assert_bit_identical(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), "planted")
    one = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(AssertionError, match="not bit-identical"):
        assert_bit_identical(one * (1 + 1e-6), one, "planted")


def test_form_ignores_values_only() -> None:
    assert_same_form(torch.zeros(3), torch.ones(3), "planted")
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_form(torch.zeros(3, dtype=torch.int64), torch.ones(3), "planted")


def test_the_reference_is_double_and_keeps_what_is_no_float() -> None:
    tree = {"a": torch.ones(2), "b": torch.arange(2), "c": torch.float32, "d": torch.int8, "e": 1}
    wide = to_reference(tree)
    assert wide["a"].dtype == torch.float64
    assert wide["b"].dtype == torch.int64
    assert (wide["c"], wide["d"], wide["e"]) == (torch.float64, torch.int8, 1)
    leaf = to_reference(torch.ones(2, dtype=torch.complex64, requires_grad=True))
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf.dtype == torch.complex128


def test_a_reference_run_stays_in_double_through_casts_inside_of_the_model() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.float().to(torch.bfloat16).softmax(0, dtype=torch.float32) + torch.ones(3)

    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    with all_in_double():
        wide = model(x)
    assert torch.equal(wide, x.softmax(0) + 1)
    assert model(x).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
