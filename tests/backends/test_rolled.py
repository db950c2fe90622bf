"""Rolled, padded and flipped rows are copied by torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.regions import no_cached_graphs
from tests.support.reports import assert_ran_as_planned


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    with size_limits_lifted(), no_cached_graphs():
        yield


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda x: x.roll(3, -1),
    "rolled back": lambda x: x.roll(-5, -1),
    "rolled round": lambda x: x.roll(1000, -1),
    "rolled by nothing": lambda x: x.roll(0, -1),
    "rows rolled": lambda x: x.roll(2, 0),
    "both": lambda x: x.roll((3, -2), (0, 1)),
    "as one row": lambda x: x.roll(7),
    "rolled and computed": lambda x: (
        x.roll(3, -1) | x if x.dtype is torch.bool else x.roll(3, -1) + x
    ),
    "padded": lambda x: functional.pad(x, (1, 2)),
    "rows padded": lambda x: functional.pad(x, (0, 0, 1, 2)),
    "cut": lambda x: functional.pad(x, (-1, 2, 0, -3)),
    "flipped": lambda x: x.flip(-1),
    "rows flipped": lambda x: x.flip(0),
    "computed and flipped": lambda x: (~x if x.dtype is torch.bool else x + 1).flip(-1, 0),
}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MOVES)
def test_every_bit_is_eagers(name: str) -> None:
    """Of every dtype, in rows and across them, each in a part of one graph of its own."""

    def moved(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {kind: MOVES[name](x) for kind, x in given.items()}

    given = {f"{dtype}": torch.randint(0, 2, (40, 70)).to(dtype) for dtype in DTYPES}
    given |= {f"{dtype}, across": torch.randint(0, 2, (70, 40)).to(dtype).T for dtype in DTYPES}
    compiled = compile_at("O2", moved)
    with torch.no_grad():
        got, own = compiled(given), moved(given)
    for kind in given:
        assert got[kind].dtype == own[kind].dtype, kind
        assert torch.equal(got[kind], own[kind]), kind
    assert_ran_as_planned(compiled, "O2")


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_change(dynamic: bool) -> None:
    compiled = compile_at("O2", lambda x: x.roll(3, -1) * 2, dynamic=dynamic)
    for width in (70, 90, 110):
        x = torch.randn(40, width)
        assert torch.equal(compiled(x), x.roll(3, -1) * 2)
    assert_ran_as_planned(compiled, "O2")


def test_rows_are_rolled_by_torch_and_others_by_the_loop() -> None:
    x = torch.randn(40, 70)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compile_at("O2", lambda x: x.roll(3, -1) * 2), x)
        _, (other,) = run_and_get_code(compile_at("O2", lambda x: x.roll(3, 0) * 2), x)
        _, (index,) = run_and_get_code(
            compile_at("O2", lambda x, i: x[:, i] * 2), x, torch.arange(70)
        )
    assert "roll_default_by_torch" in code
    assert "roll_default_by_torch" not in other + index


def test_gradients_go_back_round() -> None:
    x = torch.randn(40, 70, requires_grad=True)
    weight = torch.randn(40, 70)
    compiled = compile_at("O2", lambda x, w: (x.roll(3, -1) * w).sum())
    (got,) = torch.autograd.grad(compiled(x, weight), x)
    assert torch.equal(got, weight.roll(-3, -1))
    assert_ran_as_planned(compiled, "O2")
