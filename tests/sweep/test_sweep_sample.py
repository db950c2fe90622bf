"""A fixed part of the sweep, small enough for every run; `make sweep` runs the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch

from lowering.targets import cpu
from tests.support.compiling import BACKEND, size_limits_lifted
from tests.sweep.check import Result, run_case
from tests.sweep.expected_failures import TABLE, expected, malformed, verdict
from tests.sweep.samples import DIRECTIONS, Case, cases, has_direction, op_key, ops

CHOSEN_BY_HASH = 60
# At O2 each case costs a C++ compilation, so: every n-th op, and these dtypes only.
O2_EVERY = {"float32": 3, "bfloat16": 6}
ALWAYS = frozenset(
    """
    addmm bmm cat cumsum einsum gather index_add index_put index_select matmul mean
    nn.functional.batch_norm nn.functional.conv2d nn.functional.conv_transpose2d
    nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
    nn.functional.group_norm nn.functional.layer_norm nn.functional.linear
    nn.functional.max_pool2d nn.functional.rms_norm nn.functional.scaled_dot_product_attention
    nn.functional.silu scatter scatter_add softmax sort sum topk var where
    nn.functional.dropout nonzero
    """.split()
)


def _draw(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _chosen_ops() -> list[tuple[str, str]]:
    """Without the rows of the table: they fail in the last bits, which depends on the CPU. The
    whole sweep holds them to account."""
    known = {(row.op, row.variant) for row in TABLE}
    always = [key for key in ops() if key[0] in ALWAYS and key not in known]
    others = sorted(
        (key for key in ops() if key[0] not in ALWAYS and key not in known),
        key=lambda key: _draw(op_key(*key)),
    )
    return always + others[:CHOSEN_BY_HASH]


CHOSEN = _chosen_ops()
CASES = [case for case in cases() if (case.op, case.variant) in CHOSEN]
O2_CASES = [
    case
    for case in CASES
    if case.dtype in O2_EVERY and CHOSEN.index((case.op, case.variant)) % O2_EVERY[case.dtype] == 0
]


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_no_size_limits() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with size_limits_lifted():
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_o0_and_o1(case: Case) -> None:
    _demand_verdicts(case, ("O0", "O1"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", O2_CASES, ids=str)
def test_o2(case: Case) -> None:
    results = _demand_verdicts(case, ("O2",))
    if BACKEND == "unified":
        for result in results:
            if result.dtype == "complex64" and refused_on_complex(result.op):
                continue
            assert result.status == "skip" or not result.graphs or result.providers != "eager", (
                f"{result.label} went to eager, so this test proved nothing"
            )


def refused_on_complex(op: str) -> bool:
    """Left to eager on purpose: the capability table says why."""
    return any(op.replace(".", "_") in row.refused_complex_ops for row in cpu.TARGET.rows)


def test_the_table_of_expected_failures_is_well_formed() -> None:
    assert not list(malformed())
    assert len(set(TABLE)) == len(TABLE)


def test_a_row_whose_case_passes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sweep import expected_failures

    row = expected_failures.Expected("add", "", "float32", ("O2",), "forward", "planted")
    monkeypatch.setattr(expected_failures, "TABLE", (row,))
    result = Result("add", "", "float32", "forward", "O2", "pass")
    assert "remove this row" in verdict(result)
    result.status = "fail"
    assert verdict(result) == "expected"
    result.level = "O1"
    assert "fail" in verdict(result)


def _demand_verdicts(case: Case, levels: tuple[str, ...]) -> list[Result]:
    results = [
        result
        for direction in DIRECTIONS
        if has_direction(case, direction)
        for result in run_case(case, direction, levels)
    ]
    wrong = [
        verdict(result) for result in results if verdict(result) not in ("pass", "skip", "expected")
    ]
    assert not wrong, "\n".join(wrong)
    known = [row for result in results if (row := expected(result)) and result.status == "fail"]
    if known:
        pytest.xfail("; ".join(str(row) for row in known))
    return results
