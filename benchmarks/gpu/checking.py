"""Is a kernel right? By the rule of the levels O1 and O2: err <= 2 x torch's own + 4 eps.

The same errors as `kernel_dispatch.numerics`, worked out in parts on the device: float64 copies of
a whole output, three of them, would not fit beside the largest ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.gpu.case import FORWARD, Case, Function, Inputs
from kernel_dispatch.numerics import EAGER_FACTOR, EPS_FACTOR, is_inexact, to_reference
from triton_kernels import launching

_PART = 1 << 26  # numbers at a time
_SLICE = 64  # rows of a huge tensor that are looked at together


@dataclass(frozen=True)
class Verdict:
    what: str
    error: float
    own: float  # torch's own error
    bound: float
    fault: str = ""  # what is wrong beside the error

    @property
    def kept(self) -> bool:
        return not self.fault and self.error <= self.bound

    @property
    def share(self) -> float:
        """How much of what is allowed was used."""
        return self.error / self.bound if self.bound else float(self.error > 0)

    def __str__(self) -> str:
        text = f"{self.what}: error {self.error:.2e}, allowed {self.bound:.2e}"
        return f"{text} (torch's own {self.own:.2e}) {self.fault}".rstrip()


@dataclass(frozen=True)
class Checked:
    verdicts: list[Verdict]
    launched: list[str]


def check(case: Case, inputs: Inputs) -> Checked:
    """Forward and, where the inputs want gradients, backward.

    Layouts are put to our kernels alone: torch's attention on CUDA reads wrong numbers, or traps,
    where rows do not begin at multiples of 16 bytes (seen with torch 2.11 on an H100).
    """
    with launching.watched() as launched:
        got, gradients = run(case.ours, inputs)
    own, own_gradients = run(case.own, list(map(_dense, inputs)))
    got, own = case.view(got), case.view(own)
    truth, true_gradients = run(case.own, to_reference(list(inputs)))
    verdicts = [*judged("output", got, own, case.view(truth))]
    verdicts += judged("gradient", gradients, own_gradients, true_gradients)
    return Checked(verdicts, launched)


def check_slices(case: Case, inputs: Inputs) -> Checked:
    """Of a tensor of more than 2^31 numbers: the first rows, the last, and those at 2^31.

    Rows do not depend on each other, so those of the truth are worked out on their own; inputs
    that all rows share want no gradient.
    """
    shared = [i for i, x in enumerate(inputs) if i not in case.rows_of and isinstance(x, Tensor)]
    inputs = tuple(x.detach() if i in shared else x for i, x in enumerate(inputs))
    with launching.watched() as launched:
        got, gradients = run(case.ours, inputs)
    cotangents = [incoming(leaf, seed) for seed, leaf in enumerate(differentiable(got))]
    rows = inputs[case.rows_of[0]].shape
    verdicts: list[Verdict] = []
    for start in _starts(rows[0], torch.Size(rows[1:]).numel()):
        part = slice(start, start + _SLICE)
        some = tuple(x[part] if i in case.rows_of else x for i, x in enumerate(inputs))
        given = [one[part] for one in cotangents]
        own = run(case.own, some, given)
        truth = run(case.own, to_reference(list(some)), given)
        cut = pytree.tree_map(lambda leaf, part=part: leaf[part], (got, gradients))
        verdicts += judged(f"rows from {start}", cut, own, truth)
    return Checked(verdicts, launched)


def _starts(rows: int, columns: int) -> list[int]:
    """Also where 2^31 and 2^32 numbers, and bytes of two, are behind."""
    places = [0, rows - _SLICE]
    places += [(1 << power) // columns - _SLICE // 2 for power in (30, 31, 32)]
    return sorted({max(0, min(place, rows - _SLICE)) for place in places})


# --- running --------------------------------------------------------------------------------------


def run(
    function: Function, inputs: Sequence[Any], cotangents: Sequence[Tensor] | None = None
) -> tuple[Any, list[Tensor]]:
    """What it gives, and the gradients of the inputs that want one.

    In this thread: on GPUs torch runs backwards in threads of its own, where neither what is
    launched can be watched nor the choice of a configuration be made from here.
    """
    fresh = [leaf(value) for value in inputs]
    with torch.autograd.set_multithreading_enabled(False):
        outputs = function(*fresh)
        roots, wanted = differentiable(outputs), wanting(fresh)
        if not roots or not wanted:
            return outputs, []
        given = cotangents or [incoming(root, seed) for seed, root in enumerate(roots)]
        given = [one.to(root.dtype) for one, root in zip(given, roots, strict=True)]
        found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
    gradients = [
        torch.zeros_like(into) if gradient is None else gradient
        for into, gradient in zip(wanted, found, strict=True)
    ]
    return outputs, gradients


def _dense(value: Any) -> Any:
    """The same numbers in memory of their own, without gaps."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(value.requires_grad)


def leaf(value: Any) -> Any:
    """The same numbers in the same memory, without history."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def wanting(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def differentiable(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]


def incoming(output: Tensor, seed: int) -> Tensor:
    """Random, not uniform, and the same for every dtype; drawn on the device, for they are many."""
    generator = torch.Generator(output.device).manual_seed(seed)
    drawn = torch.randn(
        output.shape, generator=generator, device=output.device, dtype=torch.float16
    )
    return drawn.to(output.dtype)


# --- judging --------------------------------------------------------------------------------------


def judged(what: str, got: Any, own: Any, truth: Any) -> Iterator[Verdict]:
    trees = [pytree.tree_leaves(tree) for tree in (got, own, truth)]
    if len({len(leaves) for leaves in trees}) != 1:
        counts = " and ".join(str(len(leaves)) for leaves in trees)
        yield Verdict(what, 0.0, 0.0, 0.0, f"{counts} outputs")
        return
    for index, (mine, eagers, true) in enumerate(zip(*trees, strict=True)):
        if isinstance(eagers, Tensor) and is_inexact(eagers):
            yield _judge(f"{what} {index}", mine.detach(), eagers.detach(), true.detach())


def _judge(what: str, got: Tensor, own: Tensor, truth: Tensor) -> Verdict:
    if (got.shape, got.dtype) != (own.shape, own.dtype):
        return Verdict(
            what, 0.0, 0.0, 0.0, f"{got.dtype}{list(got.shape)}, torch {own.dtype}{list(own.shape)}"
        )
    scale = off = own_off = 0.0
    elsewhere = 0
    for mine, eagers, true in _parts(got, own, truth):
        finite = torch.isfinite(mine) & torch.isfinite(eagers) & torch.isfinite(true)
        # In float16 torch may overflow on its way where the result does not: that is no model.
        rounded = true.to(own.dtype).double()
        for find in (torch.isnan, torch.isposinf, torch.isneginf):
            found = find(mine)
            elsewhere += int(((found != find(eagers)) & (found != find(rounded))).sum())
        scale = max(scale, _largest(true, finite))
        off = max(off, _largest(mine - true, finite))
        own_off = max(own_off, _largest(eagers - true, finite))
    scale = scale or 1.0
    error, owns = off / scale, own_off / scale
    bound = EAGER_FACTOR * owns + EPS_FACTOR * torch.finfo(own.dtype).eps
    fault = f"NaN or infinities at {elsewhere} other places than torch's" if elsewhere else ""
    return Verdict(what, error, owns, bound, fault)


def _parts(*tensors: Tensor) -> Iterator[list[Tensor]]:
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _PART):
        yield [one[start : start + _PART].double() for one in flat]


def _largest(values: Tensor, where: Tensor) -> float:
    if not values.numel():
        return 0.0
    return float(torch.where(where, values.abs(), torch.zeros_like(values)).max())


# --- before something is timed --------------------------------------------------------------------


def is_near(got: Any, own: Any, tolerance: float = 0.05) -> bool:
    """Is it the same computation at all? What it is worth in detail, `check` tells."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(own), strict=True)
    return all(_distance(*pair) <= tolerance for pair in pairs if isinstance(pair[1], Tensor))


def _distance(got: Tensor, own: Tensor) -> float:
    """Relative, in the L2 norm."""
    off = total = 0.0
    for mine, eagers in _parts(got.detach(), own.detach()):
        off += float((mine - eagers).square().sum())
        total += float(eagers.square().sum())
    return (off / total) ** 0.5 if total else off**0.5


def of_direction(function: Function, inputs: Inputs, direction: str) -> Any:
    """Its outputs, or what flows back."""
    if direction == FORWARD:
        with torch.no_grad():
            return function(*inputs)
    outputs, gradients = run(function, inputs)
    return [outputs, gradients] if direction != "backward" else gradients
