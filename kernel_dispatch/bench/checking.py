"""Is a contender's output right? Nothing is timed before this says yes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_dispatch.bench.results import Numerics
from kernel_dispatch.bench.stepping import Step, tensors_of
from kernel_dispatch.numerics import EAGER_FACTOR, EPS_FACTOR, is_inexact, measure

# Without a float64 reference only eager is there to compare with: rounding in another order may
# differ this many units in the last place, far below what a wrong kernel does.
_EPS_WITHOUT_REFERENCE = 1000.0


class WrongResult(Exception):
    """A contender's output breaks what it promises; the text says where and by how much."""


@dataclass(frozen=True)
class Truth:
    """What eager gives, and what float64 gives; saved by the baseline's process for all others."""

    baseline: list[torch.Tensor]
    reference: list[torch.Tensor] | None  # None: the case does not run in float64
    note: str = ""  # why there is no reference, or why values cannot be compared
    repeatable: bool = True  # False: two calls of eager differ (in-place state, random numbers)
    random: bool = False  # two calls differ, and do not from the same seed
    gradients: int = 0  # so many of the tensors, the last ones, are gradients

    def save(self, path: str) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str) -> Truth:
        return cls(**torch.load(path, weights_only=True))


def establish(step: Step) -> Truth:
    """Eager's outputs and the reference. The reference comes first: a case may change its state."""
    reference, note = None, ""
    try:
        reference = _kept(step.in_double())
    except Exception as error:  # noqa: BLE001  (whatever a model does with float64)
        note = f"no float64 reference ({_one_line(error)}); compared with eager"
    baseline = _seeded(step, 1)
    if not baseline:
        raise WrongResult("it returns no tensor, so there is nothing to verify")
    if reference is not None and len(reference) != len(baseline):
        reference, note = None, "float64 gives other outputs; compared with eager"
    repeatable = _same(baseline, _seeded(step, 2))
    random = not repeatable and _same(baseline, _seeded(step, 1))
    if random:
        note = "its outputs are random: only their form was compared"
    gradients = len(step.gradients()) if step.training else 0
    return Truth(baseline, reference, note, repeatable, random, gradients)


def _seeded(step: Step, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return _kept(step.run())


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(some, others, strict=True)
    )


def check(outputs: Any, truth: Truth, tolerance: float | None) -> Numerics | None:
    """The errors, or WrongResult. `tolerance` None: 2 x eager's error + 4 eps per output.

    None where the values are random, so that only their form could be compared.
    """
    got = _kept(outputs)
    if len(got) != len(truth.baseline):
        raise WrongResult(f"{len(got)} output tensors, eager has {len(truth.baseline)}")
    for index, (mine, eagers) in enumerate(zip(got, truth.baseline, strict=True)):
        _demand_form(mine, eagers, index)
    if truth.random:
        return None
    outputs_end = len(got) - truth.gradients
    found = [
        _numerics(got[i], truth.baseline[i], _reference(truth, i), tolerance, i)
        for i in range(outputs_end)
    ]
    if truth.gradients:
        found.append(_gradient_numerics(got[outputs_end:], truth, tolerance))
    return max(filter(None, found), key=_share, default=Numerics(0.0, 0.0, 0.0))


def _reference(truth: Truth, index: int) -> torch.Tensor | None:
    return None if truth.reference is None else truth.reference[index]


def _numerics(
    got: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor | None,
    tolerance: float | None,
    index: int,
) -> Numerics | None:
    if not is_inexact(eager):
        if tolerance is None and not torch.equal(got, eager):
            count = int((got != eager).sum())
            raise WrongResult(
                f"output {index}: {count} of {eager.numel()} values differ from eager"
            )
        return None
    if eager.numel() == 0:
        return None
    for name, find in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        if not torch.equal(find(got), find(eager)):
            raise WrongResult(
                f"output {index}: {name} where eager has none, or the other way round"
            )
    errors = measure(got, eager, eager if reference is None else reference)
    allowed = errors.bound if tolerance is None else tolerance
    if tolerance is None and reference is None:
        allowed = _EPS_WITHOUT_REFERENCE * errors.eps
    if errors.candidate > allowed:
        raise WrongResult(
            f"output {index}: error {errors.candidate:.1e} against float64, allowed {allowed:.1e} "
            f"(eager's own is {errors.eager:.1e})"
        )
    return Numerics(errors.candidate, errors.eager, allowed)


def _gradient_numerics(
    got: Sequence[torch.Tensor], truth: Truth, tolerance: float | None
) -> Numerics:
    """All gradients as one vector, in the L2 norm.

    One ReLU whose input rounds to the other side of zero changes single gradients a lot: eager
    against float64 as much as a contender that rounds otherwise. Their sum of squares tells such
    flips, which are few, from a wrong backward.
    """
    eagers = truth.baseline[-truth.gradients :]
    references = eagers if truth.reference is None else truth.reference[-truth.gradients :]
    eps = torch.finfo(eagers[0].dtype).eps
    mine, own = _distance(got, references), _distance(eagers, references)
    allowed = EAGER_FACTOR * own + EPS_FACTOR * eps if tolerance is None else tolerance
    if tolerance is None and truth.reference is None:
        allowed = _EPS_WITHOUT_REFERENCE * eps
    if not mine <= allowed:  # NaN is not
        raise WrongResult(
            f"gradients: error {mine:.1e} in the L2 norm, allowed {allowed:.1e} "
            f"(eager's own is {own:.1e})"
        )
    return Numerics(mine, own, allowed)


def _distance(tensors: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    off = scale = 0.0
    for tensor, reference in zip(tensors, references, strict=True):
        off += float((tensor.to(reference.dtype) - reference).abs().double().square().sum())
        scale += float(reference.abs().double().square().sum())
    return math.sqrt(off / scale) if scale else math.sqrt(off)


def _share(numerics: Numerics) -> float:
    """How much of what is allowed was used: the output that is shown is the worst by this."""
    return numerics.error / numerics.allowed if numerics.allowed else 0.0


def _demand_form(mine: torch.Tensor, eagers: torch.Tensor, index: int) -> None:
    for what in ("shape", "dtype"):
        one, other = getattr(mine, what), getattr(eagers, what)
        if one != other:
            raise WrongResult(f"output {index}: {what} {one}, eager has {other}")


def _kept(outputs: Any) -> list[torch.Tensor]:
    """Copies on the CPU: the next call may write into what this one returned."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors_of(outputs)]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:200]
