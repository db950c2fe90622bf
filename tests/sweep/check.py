"""One case through one level: eager, the float64 reference, the compiled op, and the verdict."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernel_dispatch.numerics import Errors, double_by_default, is_inexact, to_reference
from tests.support.compiling import BACKEND, compile_at
from tests.support.numerics import assert_bit_identical, assert_contract, assert_same_form
from tests.support.reports import fallbacks_of, providers_of
from tests.sweep.samples import UNINITIALISED, Case, Sample, has_direction, ops, samples, seed_of

OpFunction = Callable[..., Any]

# Ops whose output shape or value depends on data break the graph by default, and then nothing of
# them would be tested.
CAPTURE = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


@dataclass
class Result:
    """One row of the sweep. `status` is pass, fail, skip, timeout or crash."""

    op: str
    variant: str
    dtype: str
    direction: str
    level: str
    status: str
    detail: str = ""
    compared: str = ""
    candidate_error: float = 0.0
    eager_error: float = 0.0
    graphs: int = 0  # 0: the graph broke before the op, so the backend was never called
    providers: str = ""  # who computed the graphs, as the report has it
    fallbacks: str = ""
    seconds: float = 0.0

    @property
    def case(self) -> Case:
        return Case(self.op, self.variant, self.dtype)

    @property
    def label(self) -> str:
        return f"{self.case} {self.direction} {self.level}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Baseline:
    """What eager gives for one sample, and how much of it can be compared."""

    eager: Any
    reference: Any
    compared: str  # "reference", "eager" (no float64 run of this op) or "form"
    random: bool

    def compared_at(self, level: str) -> str:
        """From O2 on the generator's stream is Inductor's: other values, same distribution."""
        return "form" if self.random and level not in ("O0", "O1") else self.compared


def run_case(
    case: Case, direction: str, levels: tuple[str, ...], *, limit: int = 1, backend: str = BACKEND
) -> Iterator[Result]:
    """The verdicts of one case in one direction, one per level."""
    if not has_direction(case, direction):
        return
    try:
        inputs = samples(case, requires_grad=direction == "backward", limit=limit)
    except Exception as error:  # noqa: BLE001 - OpInfo's generators raise whatever they like
        inputs, why = [], f"no sample: {error}"
    else:
        why = "no sample"
    runs = [(sample, _baseline(case, sample, direction)) for sample in inputs]
    for level in levels:
        if runs:
            yield _run_level(case, direction, level, runs, backend)
        else:
            yield _result(case, direction, level, "skip", why)


def _run_level(
    case: Case,
    direction: str,
    level: str,
    runs: list[tuple[Sample, _Baseline | str]],
    backend: str,
) -> Result:
    result = _result(case, direction, level, "skip")
    start = time.perf_counter()
    for sample, baseline in runs:
        if isinstance(baseline, str):
            result.detail = result.detail or baseline
            continue
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = compile_at(level, _function(case), backend=backend)
        result.compared = baseline.compared_at(level)
        try:
            with warnings.catch_warnings(), torch._dynamo.config.patch(CAPTURE):
                warnings.simplefilter("ignore")  # a fallback's warning: it stands in the result
                candidate = _run(case, sample, direction, compiled)
            errors = _judge(candidate, baseline, level, result.label)
        except AssertionError as error:
            result.status, result.detail = "fail", f"value: {error}"
        except Exception as error:  # noqa: BLE001 - whatever is raised is the finding
            result.status, result.detail = "fail", f"{type(error).__name__}: {error}"
        else:
            result.status, result.detail = "pass", ""
            result.candidate_error = max((e.candidate for e in errors), default=0.0)
            result.eager_error = max((e.eager for e in errors), default=0.0)
        if backend == "unified":
            result.providers = ",".join(providers_of(compiled))
            result.fallbacks = "; ".join(fallbacks_of(compiled))[:500]
        result.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if result.status == "fail":
            break
    result.detail = result.detail[:2000]
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def _judge(candidate: Any, baseline: _Baseline, level: str, where: str) -> list[Errors]:
    if baseline.compared_at(level) == "form":
        assert_same_form(candidate, baseline.eager, where)
    elif level == "O0":
        assert_bit_identical(candidate, baseline.eager, where)
    else:
        return assert_contract(candidate, baseline.eager, baseline.reference, where)
    return []


def _baseline(case: Case, sample: Sample, direction: str) -> _Baseline | str:
    """Eager's outputs and their reference, or the sentence why eager has none."""
    function = _function(case)
    torch.manual_seed(seed_of(case))
    before = torch.get_rng_state()
    try:
        eager = _run(case, sample, direction, function)
    except Exception as error:  # noqa: BLE001 - eager's own refusal, whatever its class
        return f"eager raises {type(error).__name__}: {error}"
    drew = not torch.equal(before, _state_after(lambda: _forward_only(case, sample, function)))
    if case.op in UNINITIALISED:
        return _Baseline(eager, None, "form", drew)
    if drew:
        return _Baseline(eager, eager, "eager", drew)
    reference = _reference(case, sample, direction, function)
    try:
        assert_contract(eager, eager, reference, "reference")
    except AssertionError:
        return _Baseline(eager, eager, "eager", drew)
    return _Baseline(eager, reference, "reference", drew)


def _reference(case: Case, sample: Sample, direction: str, function: OpFunction) -> Any:
    """The op in float64; None where it has no float64 form."""
    wide = Sample(to_reference(sample.arguments), sample.process_outputs)
    try:
        with double_by_default():
            return _run(case, wide, direction, function)
    except Exception:  # noqa: BLE001 - no reference; the caller says so in `compared`
        return None


def _state_after(call: Callable[[], Any]) -> torch.Tensor:
    call()
    return torch.get_rng_state()


def _forward_only(case: Case, sample: Sample, function: OpFunction) -> None:
    args, kwargs = _fresh(sample.arguments)
    torch.manual_seed(seed_of(case))
    function(*args, **kwargs)


def _run(case: Case, sample: Sample, direction: str, function: OpFunction) -> Any:
    """Outputs and the inputs as the op left them; in the backward direction gradients as well."""
    args, kwargs = _fresh(sample.arguments)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _needs_grad(leaf)]
    if direction == "backward":
        args, kwargs = pytree.tree_map(_non_leaf, (args, kwargs))
    torch.manual_seed(seed_of(case))
    outputs = function(*args, **kwargs)
    result = {"output": outputs, "input": (args, kwargs)}
    if direction == "backward":
        result["gradient"] = _gradients(sample, outputs, leaves)
    return pytree.tree_map(_detached, result)


def _gradients(sample: Sample, outputs: Any, leaves: list[torch.Tensor]) -> list[Any]:
    processed = sample.process_outputs(outputs)
    roots = [leaf for leaf in pytree.tree_leaves(processed) if _needs_grad(leaf)]
    if not roots:
        raise ValueError("no output has a gradient")
    seeds = [_cotangent(root, index) for index, root in enumerate(roots)]
    return list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))


def _cotangent(root: torch.Tensor, index: int) -> torch.Tensor:
    """The same numbers for the same shape, whatever the precision."""
    generator = torch.Generator().manual_seed(index)
    dtype = torch.complex64 if root.is_complex() else torch.float32
    return torch.randn(root.shape, generator=generator, dtype=dtype).to(root.dtype)


def _fresh(arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """A copy that an op may write to, with the strides and the aliases of one tensor kept."""
    return pytree.tree_map(_copy, arguments)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.detach()
    if plain.layout != torch.strided or plain.is_conj() or plain.is_neg() or plain.is_nested:
        copied = plain.clone()
    else:
        storage = plain.untyped_storage().clone()
        copied = torch.empty(0, dtype=plain.dtype)
        copied.set_(storage, plain.storage_offset(), plain.size(), plain.stride())
    return copied.requires_grad_(leaf.requires_grad)


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _non_leaf(leaf: Any) -> Any:
    """An op that writes to its input may not write to a leaf that requires a gradient."""
    return leaf.clone() if _needs_grad(leaf) and is_inexact(leaf) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _function(case: Case) -> OpFunction:
    op = ops()[case.op, case.variant].get_op()

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return call


def _result(case: Case, direction: str, level: str, status: str, detail: str = "") -> Result:
    return Result(case.op, case.variant, case.dtype, direction, level, status, detail[:500])
