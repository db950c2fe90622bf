"""Is a contender's output right? Nothing is timed before this says yes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
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
    # Eager's own error per output, and then one for all gradients together; 0 without a reference.
    errors: list[float]
    gradients: int = 0  # so many of the tensors, the last ones, are gradients
    note: str = ""  # why there is no reference, or why values cannot be compared
    repeatable: bool = True  # False: two calls of eager differ (in-place state, random numbers)
    random: bool = False  # two calls differ, and do not from the same seed

    def save(self, path: str) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str) -> Truth:
        return cls(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Bound:
    """What a contender promises: so many times eager's own error, or a tolerance of its own."""

    factor: float = EAGER_FACTOR
    tolerance: float | None = None

    def of(self, eagers: float, eps: float, has_reference: bool) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if not has_reference:
            return _EPS_WITHOUT_REFERENCE * eps
        return self.factor * eagers + EPS_FACTOR * eps


def establish(step: Step) -> Truth:
    """Eager's outputs, their errors and the reference. The step is used up: its weights change."""
    # The reference comes first: a case may change its state.
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
    runs = [baseline, *_moved_runs(step)] if repeatable else [baseline]
    errors = _worst_errors(runs, reference or baseline, gradients)
    return Truth(baseline, reference, errors, gradients, note, repeatable, random)


def _moved_runs(step: Step) -> Iterator[list[torch.Tensor]]:
    """Eager on weights and inputs that are moved by one rounding, twice.

    One run may be near the truth by luck, or sit at an edge: a ReLU whose input rounds to the other
    side of zero changes single gradients a lot. Nobody can be asked to be nearer than that.
    """
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        for tensor in step.tensors():
            if is_inexact(tensor):
                signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                factor = 1 + signs.to(tensor.device) * torch.finfo(tensor.dtype).eps
                with torch.no_grad(), contextlib.suppress(RuntimeError):  # expanded: left as it is
                    tensor.mul_(factor.to(tensor.dtype))
        yield _seeded(step, 1)


def _worst_errors(
    runs: Sequence[Sequence[torch.Tensor]], truth: Sequence[torch.Tensor], gradients: int
) -> list[float]:
    end = len(truth) - gradients
    errors = [max(_error(run[i], truth[i]) for run in runs) for i in range(end)]
    if gradients:
        errors.append(max(_distance(run[end:], truth[end:]) for run in runs))
    return errors


def _seeded(step: Step, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return _kept(step.run())


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(some, others, strict=True)
    )


# --- a contender's outputs ------------------------------------------------------------------------


def check(outputs: Any, truth: Truth, bound: Bound) -> Numerics | None:
    """The worst output's numbers, or WrongResult.

    None where the values are random, so that only their form could be compared.
    """
    got = _kept(outputs)
    if len(got) != len(truth.baseline):
        raise WrongResult(f"{len(got)} output tensors, eager has {len(truth.baseline)}")
    for index, (mine, eagers) in enumerate(zip(got, truth.baseline, strict=True)):
        _demand_form(mine, eagers, index)
    if truth.random:
        return None
    end = len(got) - truth.gradients
    found = [_checked_output(got[index], truth, bound, index) for index in range(end)]
    if truth.gradients:
        found.append(_checked_gradients(got[end:], truth, bound))
    return max(filter(None, found), key=_share, default=Numerics(0.0, 0.0, 0.0))


def _checked_output(got: torch.Tensor, truth: Truth, bound: Bound, index: int) -> Numerics | None:
    eager = truth.baseline[index]
    reference = eager if truth.reference is None else truth.reference[index]
    if not is_inexact(eager):
        if bound.tolerance is None and not torch.equal(got, eager):
            count = int((got != eager).sum())
            raise WrongResult(
                f"output {index}: {count} of {eager.numel()} values differ from eager"
            )
        return None
    for name, find in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        if not torch.equal(find(got), find(eager)):
            raise WrongResult(
                f"output {index}: {name} where eager has none, or the other way round"
            )
    return _judged(f"output {index}", _error(got, reference), truth, bound, index)


def _checked_gradients(got: Sequence[torch.Tensor], truth: Truth, bound: Bound) -> Numerics:
    """All of them as one vector: single values may be far off, a wrong backward is so in sum."""
    references = (truth.reference or truth.baseline)[-truth.gradients :]
    return _judged("gradients", _distance(got, references), truth, bound, -1)


def _judged(what: str, error: float, truth: Truth, bound: Bound, index: int) -> Numerics:
    eagers = truth.errors[index]
    eps = torch.finfo(truth.baseline[index].dtype).eps
    allowed = bound.of(eagers, eps, truth.reference is not None)
    if not error <= allowed:  # NaN is not
        raise WrongResult(
            f"{what}: error {error:.1e} against float64, allowed {allowed:.1e} "
            f"(eager's own is {eagers:.1e})"
        )
    return Numerics(error, eagers, allowed)


def _error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the largest value, where both are finite."""
    if not is_inexact(tensor) or not tensor.numel():
        return 0.0
    return measure(tensor, tensor, reference).candidate


def _distance(tensors: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """Relative, in the L2 norm over all of them."""
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
