"""The sweep's known failures, one row each, strict: a row that passes is an error.

A row names the op, its variant, the dtype, the levels, the direction and the reason. `ANY` stands
for every value of a field of which the op has several. Rows whose reason starts with `SHARED` fail
in the same way with `backend="inductor"` of the same torch (run the sweep with `--backend inductor`
to see it); every other row is a debt of this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.sweep.check import Result
from tests.sweep.samples import op_key, ops

ANY = "*"
SHARED = "shared with Inductor: "


@dataclass(frozen=True)
class Expected:
    op: str
    variant: str
    dtype: str
    levels: tuple[str, ...]
    direction: str
    reason: str

    def covers(self, result: Result) -> bool:
        return (
            (self.op, self.variant) == (result.op, result.variant)
            and self.dtype in (ANY, result.dtype)
            and result.level in self.levels
            and self.direction in (ANY, result.direction)
        )

    def __str__(self) -> str:
        key = op_key(self.op, self.variant)
        return f"{key} {self.dtype} {'/'.join(self.levels)} {self.direction} ({self.reason})"


_MEAN = SHARED + "the mean that is computed along with the variance loses bits where it is near 0"
_COND = SHARED + "singular values differ from eager's in the last bits, and their quotient in more"

TABLE: tuple[Expected, ...] = (
    Expected("var_mean", "", "float32", ("O2",), ANY, _MEAN),
    Expected("var_mean", "unbiased", "float32", ("O2",), ANY, _MEAN),
    Expected("std_mean", "", "float32", ("O2",), ANY, _MEAN),
    Expected("std_mean", "unbiased", "float32", ("O2",), ANY, _MEAN),
    Expected("linalg.cond", "", "float32", ("O2",), "forward", _COND),
)


def expected(result: Result) -> Expected | None:
    return next((row for row in TABLE if row.covers(result)), None)


def verdict(result: Result) -> str:
    """pass, skip, expected (a failure with a row), or the sentence that makes the run fail."""
    row = expected(result)
    if result.status in ("pass", "skip"):
        if row and result.status == "pass":
            return f"{result.label} passes now: remove this row from expected_failures.py: {row}"
        return result.status
    return "expected" if row else f"{result.label}: {result.status}: {result.detail}"


def malformed() -> Iterable[str]:
    """Rows that can never match: an op that the database lacks, or a row without a reason."""
    for row in TABLE:
        if (row.op, row.variant) not in ops():
            yield f"no such op: {row}"
        if not row.reason:
            yield f"a row without a reason: {row}"
