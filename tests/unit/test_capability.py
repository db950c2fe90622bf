"""check(): a pure function from a row, a piece of work and a situation to every reason for a no."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowering.capability import CapabilityRow, Situation, Work, check
from lowering.levels import Level

pytestmark = pytest.mark.quick

ROW = CapabilityRow("cpu", "inductor", level=Level.O2)
GOOD = Situation(level=Level.O2)


def codes(row: CapabilityRow, work: Work, situation: Situation = GOOD) -> list[str]:
    return [reason.code for reason in check(row, work, situation)]


def test_yes_is_empty() -> None:
    assert check(ROW, Work(), GOOD) == ()
    assert check(ROW, Work(), Situation(level=Level.O3)) == ()


STRICTEST = CapabilityRow(
    "cpu",
    "picky",
    level=Level.O3,
    dtypes=frozenset({"float32"}),
    refused_ops=frozenset({"cumsum"}),
    training=False,
    dynamic=False,
    mutation=False,
    subclasses=False,
    features=frozenset({"avx512f", "amd"}),
    min_ops=5,
    min_bytes=100,
    min_flops=1000,
)
WORST = Work(
    dtypes=frozenset({"float64", "int8"}),
    ops=frozenset({"cumsum", "add"}),
    op_count=1,
    bytes_moved=3,
    flops=7,
    training=True,
    dynamic=True,
    mutation=True,
    subclasses=frozenset({"TwoTensor"}),
)
NOWHERE = Situation(
    level=Level.O0,
    features=frozenset({"amd"}),
    disabled=frozenset({"picky"}),
    absent={"picky": "not installed"},
)


def test_every_reason_at_once() -> None:
    reasons = check(STRICTEST, WORST, NOWHERE)
    assert [reason.code for reason in reasons] == [
        "level-too-low",
        "provider-disabled",
        "provider-absent",
        "arch-unsupported",
        "dtype-unsupported",
        "op-unsupported",
        "too-small",
        "too-small",
        "training-unsupported",
        "dynamic-unsupported",
        "mutation-unsupported",
        "subclass-unsupported",
    ]
    texts = {reason.code: reason.text for reason in reasons}
    assert texts["arch-unsupported"] == "needs avx512f"
    assert "float64, int8" in texts["dtype-unsupported"]
    assert "not installed" in texts["provider-absent"]
    assert "TwoTensor" in texts["subclass-unsupported"]


def test_is_pure() -> None:
    assert check(STRICTEST, WORST, NOWHERE) == check(STRICTEST, WORST, NOWHERE)


ONE, FLOATS = frozenset({"a"}), frozenset({"float32"})
ALONE = {"refused_alone": ONE}


@pytest.mark.parametrize(
    ("row", "work", "expected"),
    [
        ({"dtypes": frozenset({"float32"})}, Work(dtypes=frozenset({"float32"})), []),
        ({"refused_dtypes": frozenset({"complex64"})}, Work(dtypes=frozenset({"int8"})), []),
        (
            {"refused_dtypes": frozenset({"complex64"})},
            Work(dtypes=frozenset({"int8", "complex64"})),
            ["dtype-unsupported"],
        ),
        ({"refused_ops": frozenset({"a"})}, Work(ops=frozenset({"b"})), []),
        # a graph is too small only when it has few ops *and* moves little
        ({"min_ops": 2, "min_bytes": 100}, Work(op_count=1, bytes_moved=99), ["too-small"]),
        ({"min_ops": 2, "min_bytes": 100}, Work(op_count=2, bytes_moved=0), []),
        ({"min_ops": 2, "min_bytes": 100}, Work(op_count=1, bytes_moved=100), []),
        (
            {"min_ops": 2, "min_bytes": 100, "min_bytes_training": 200},
            Work(op_count=1, bytes_moved=199, training=True),
            ["too-small"],
        ),
        (
            {"min_ops": 2, "min_bytes": 100, "min_bytes_training": 200},
            Work(op_count=1, bytes_moved=199),
            [],
        ),
        # by itself: no other op but views, and float32
        (ALONE, Work(ops=ONE, op_count=1, dtypes=FLOATS), ["too-small"]),
        (ALONE, Work(ops=ONE | {"view"}, op_count=1, dtypes=FLOATS), ["too-small"]),
        (ALONE, Work(ops=ONE, op_count=2, dtypes=FLOATS), []),
        (ALONE, Work(ops=ONE, op_count=1, dtypes=frozenset({"float64"})), []),
        (ALONE, Work(ops=frozenset({"b"}), op_count=1, dtypes=FLOATS), []),
        ({"min_flops": 10}, Work(flops=9), ["too-small"]),
        ({"min_flops": 10}, Work(flops=10), []),
        ({"training": False}, Work(), []),
        ({"training": False}, Work(training=True), ["training-unsupported"]),
        ({"dynamic": False}, Work(dynamic=True), ["dynamic-unsupported"]),
        ({"mutation": False}, Work(mutation=True), ["mutation-unsupported"]),
    ],
)
def test_each_limit(row: dict, work: Work, expected: list[str]) -> None:
    assert codes(replace(ROW, **row), work) == expected


def test_every_row_of_ours_is_well_formed() -> None:
    from lowering import providers, targets

    for target in targets.ours():
        for row in target.rows:
            assert row.target == target.name
            assert row.provider in providers.names()
            assert row.why
    cpu = targets.find("cpu")
    assert cpu is not None
    last = min((row for row in cpu.rows if row.region == "graph"), key=lambda row: row.priority)
    assert last.provider == "eager"
    assert check(last, replace(WORST, region="graph"), Situation(level=Level.O0)) == ()
