"""How near is near enough: the table of tolerances, the errors that are reported, bit identity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kernel_dispatch import SettingError, list_levels
from kernel_dispatch.numerics import distance
from lowering import ops, tolerances
from lowering.tolerances import DTYPES, TABLE, TF32, tolerance
from tests.support.compiling import compile_at
from tests.support.numerics import assert_bit_identical
from tests.support.op_cases import CASES, Case, of
from tests.support.reports import assert_ran_as_planned

quick = pytest.mark.quick
PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.mark.parametrize("name", ["matmul2d", "layernorm"])
def test_s003_12_the_first_levels_keep_the_dtype(name: str) -> None:
    """No level below O3 lowers the precision on its own, and attention needs no fused kernel to be
    right."""
    case = next(one for one in CASES if one.op == name)
    args = case.args(torch.float32)
    for level in ("O0", "O1"):
        compiled = compile_at(level, ops.BY_NAME[name])
        (got,) = case.run(args, compiled)
        assert got.dtype == torch.float32
        assert_ran_as_planned(compiled, level)
        assert case.error([got], args) < 4e-6, "a half type would be a thousand times as far off"
        torch._dynamo.reset()


@quick
def test_s003_13_one_table_by_operation_dtype_and_level() -> None:
    """What counts as equal across devices is one table by operation, dtype and level, in code and
    in the documentation."""
    assert set(TABLE) == set(ops.BY_NAME)
    for name, row in TABLE.items():
        for level in list_levels():
            numbers = [tolerance(name, dtype, level) for dtype in DTYPES]
            assert numbers == sorted([*numbers[:2], *numbers[2:4]], key=numbers.index)
            assert numbers[0] <= numbers[1] <= numbers[3] <= numbers[2], name
            assert all(0 <= number < 0.1 for number in numbers)
        assert row.why
    assert tolerance("linear", torch.float16, "O3") == 0.05
    assert tolerance("linear", torch.float16, "O2") == 2e-3
    assert tolerance("conv2d", "float32", tf32=True) == TF32
    assert tolerance("gelu", "float32", tf32=True) == tolerance("gelu", "float32")
    with pytest.raises(SettingError, match="Did you mean 'layernorm'"):
        tolerance("layer_norm", "float32")
    with pytest.raises(SettingError, match="unknown dtype 'int64'"):
        tolerance("add", torch.int64)
    page = PAGE.read_text()
    for name, row in TABLE.items():
        numbers = " | ".join(f"{getattr(row, dtype):.0e}" for dtype in DTYPES)
        assert f"| `{name}` | {numbers} |" in page, f"docs/numerics.md lacks: {name} {numbers}"


@quick
@pytest.mark.parametrize("case", of("matmul2d", "softmax_lastdim", "layernorm", "gelu"))
def test_s003_13_the_table_notices_a_mistake(case: Case) -> None:
    args = case.args(torch.float32)
    limit = tolerance(case.op, torch.float32)
    spoilt = [one * (1 + 1e-4) for one in case.run(args)]
    assert case.error(spoilt, args) > limit
    spoilt = [one.clone() for one in case.run(args)]
    spoilt[0].flatten()[-1] += spoilt[0].nan_to_num().abs().max() * 1e-3
    assert case.error(spoilt, args) > limit


@quick
@pytest.mark.status("met, not run on hardware: no GPU here")
def test_s003_14_absolute_and_relative_error_are_reported() -> None:
    """A comparison tells the largest absolute and the largest relative error, and where it is."""
    reference = torch.tensor([[1.0, -4.0], [2.0, 0.0]], dtype=torch.float64)
    got = reference.float()
    assert distance(got, reference) == distance(reference, reference)
    got[1, 0] += 0.5
    found = distance(got, reference)
    assert (found.absolute, found.relative, found.worst_index) == (0.5, 0.125, (1, 0))
    for value in (math.nan, math.inf):
        got[0, 0] = value
        assert distance(got, reference).absolute == math.inf
    same = torch.tensor([math.nan, -math.inf, 3.0])
    assert distance(same, same).absolute == 0.0
    assert distance(same, -same).absolute == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        distance(got, same)
    if torch.cuda.is_available():
        for case in CASES:
            args = case.args(torch.float32)
            there = [a.cuda() for a in args]
            limit = tolerances.tolerance(case.op, torch.float32, tf32=True)
            assert case.error([one.cpu() for one in case.run(tuple(there))], args) <= limit


@quick
@pytest.mark.status("met, not run on hardware: gradients on a GPU were not compared, no GPU here")
@pytest.mark.parametrize("case", of("matmul2d", "linear", "gelu", "self_attention"))
def test_s003_15_gradients_of_small_sizes(case: Case) -> None:
    """Gradients are checked by differences in float64 at small sizes, and in float32 against those
    of the oracle."""
    args = case.args(torch.float32)
    leaves = [a.requires_grad_() for a in args if a.is_floating_point()]
    got = torch.autograd.grad([one.sum() for one in case.run(args)], leaves)
    wide = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    truths = case.truth(tuple(wide))
    wanted = torch.autograd.grad(
        [one.sum() for one in truths], [w for w in wide if w.is_floating_point()]
    )
    for mine, truth in zip(got, wanted, strict=True):
        assert distance(mine, truth).relative <= 4 * tolerance(case.op, torch.float32)
    if sum(leaf.numel() for leaf in leaves) < 400:
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        rest = [a for a in args if not a.is_floating_point()]
        assert torch.autograd.gradcheck(lambda *x: tuple(case.run((*x, *rest))), doubles)


@quick
def test_s003_16_reduction_orders_are_documented() -> None:
    """The page on numerics says which operations sum in another order elsewhere, what is summed,
    and why that changes the last digits."""
    page = PAGE.read_text()
    assert "sum is not associative" in page
    for name, row in TABLE.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert line.split("|")[-2].strip() == (row.sums or "nothing"), name
    reorders = {name for name, row in TABLE.items() if row.sums}
    assert {"matmul2d", "softmax_lastdim", "layernorm", "self_attention"} <= reorders
    big = torch.tensor([1e8, 1.0, -1e8])
    assert (big[0] + big[1] + big[2]) != (big[0] + big[2] + big[1])


def test_s003_19_the_lowest_level_changes_no_bit() -> None:
    """At O0 every output and gradient is eager's, bit for bit, on one model of every family
    (`tests/models` has them; here all operations in one)."""

    def everything(*tensors: torch.Tensor) -> list[torch.Tensor]:
        found, rest = [], list(tensors)
        for case in CASES:
            count = len(case.make())
            found += case.run(tuple(rest[:count]))
            rest = rest[count:]
        return found

    tensors = [tensor for case in CASES for tensor in case.args(torch.float32)]
    leaves = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    compiled = compile_at("O0", everything)
    own, got = everything(*tensors), compiled(*tensors)
    assert_bit_identical(got, own, "all operations")
    gradients = [
        torch.autograd.grad([one.sum() for one in outputs], leaves, allow_unused=True)
        for outputs in (own, got)
    ]
    assert_bit_identical(gradients[1], gradients[0], "their gradients")
    assert_ran_as_planned(compiled, "O0")
    zoo = (Path(__file__).parents[1] / "models" / "test_models.py").read_text()
    assert 'LEVELS = ("O0", ' in zoo and "assert_bit_identical" in zoo
