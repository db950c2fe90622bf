"""`check`: every kernel against float64, `unified` end to end, and the tests of the kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import checking, zoo
from benchmarks.gpu.case import Absent, Case, Shape, dtype_of, kernel
from benchmarks.gpu.cases import ALL
from benchmarks.gpu.results import FAILED, WRONG, Job, Row
from benchmarks.gpu.settings import Settings
from benchmarks.workloads import CORE, WORKLOADS
from kernel_dispatch.bench import Workload

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("O1", "O2", "O3")
# Beside the core set: what has layers that there are kernels for.
MODELS = (
    *CORE,
    "hf-qwen3",
    "hf-vit",
    "llama-prefill",
    "cnn",
    "decoder-prefill",
    "hf-bert",
    "hf-llama-decode",
)


def jobs(settings: Settings) -> list[Job]:
    """By importance: bfloat16 first, then what else there is."""
    found = [job for name in _dtypes(settings) for job in _of_dtype(settings, name)]
    return [*found, *_huge(settings), *_models(settings), *_tests(settings)]


def _dtypes(settings: Settings) -> list[str]:
    known = [name for case in ALL for name in case.dtypes_on(settings.device)]
    return [name for name in dict.fromkeys(known) if not settings.dtypes or name in settings.dtypes]


def _of_dtype(settings: Settings, dtype: str) -> Iterator[Job]:
    for case in ALL:
        if dtype not in case.dtypes_on(settings.device):
            continue
        for shape, layout in _points(case, settings.quick):
            key = f"check/{case.name}/{dtype}/{_text(shape)}/{layout}"
            yield Job(key, partial(_check, case, dtype, shape, layout, settings.device))


def _points(case: Case, quick: bool) -> list[tuple[Shape, str]]:
    """All shapes as they come, one of them in other layouts too."""
    if quick:
        return [(case.tiny, layout) for layout in case.layouts]
    usual = case.shapes[:2] if case.checks_usual else ()
    other = [(case.odd[0], layout) for layout in case.layouts[1:]]
    return [(shape, "plain") for shape in (*usual, *case.odd)] + other


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _check(case: Case, dtype: str, shape: Shape, layout: str, device: str) -> Row:
    kernel(case.kernel)
    torch.manual_seed(0)
    inputs = case.make(shape, dtype_of(dtype, device), device)
    inputs = tuple(_laid(value, layout) for value in inputs)
    return _row(checking.check(case, inputs))


def _laid(value: Any, layout: str) -> Any:
    """The same numbers: in a larger tensor, so that rows lie apart, or with columns apart."""
    if layout == "plain" or not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if layout == "transposed":
        moved = value.detach().mT.contiguous().mT
    else:
        shape = (*value.shape[:-1], value.shape[-1] + 3)
        moved = torch.empty(shape, dtype=value.dtype, device=value.device)[..., 1:-2]
        moved.copy_(value.detach())
    return moved.requires_grad_(value.requires_grad)


def _row(checked: checking.Checked) -> Row:
    worst = max(checked.verdicts, key=lambda verdict: (not verdict.kept, verdict.share))
    found: Row = {
        "error": worst.error,
        "own_error": worst.own,
        "bound": worst.bound,
        "share": worst.share,
        "verdicts": [asdict(verdict) for verdict in checked.verdicts],
        "launched": sorted(set(checked.launched)),
    }
    if not worst.kept:
        return {"status": WRONG, "reason": str(worst), **found}
    if not checked.launched:
        return {"status": FAILED, "reason": "no kernel ran: it was plain torch", **found}
    return {"remark": f"{worst.share:.0%} of the allowed error", **found}


# --- more than 2^31 numbers -----------------------------------------------------------------------


def _huge(settings: Settings) -> Iterator[Job]:
    for case in ALL:
        if case.huge is None:
            continue
        dtype = next(name for name in case.dtypes_on(settings.device))
        if settings.dtypes and dtype not in settings.dtypes:
            continue
        shape = case.tiny if settings.quick else case.huge
        key = f"check/{case.name}/{dtype}/{_text(shape)}/huge"
        yield Job(key, partial(_check_huge, case, dtype, shape, settings.device))


def _check_huge(case: Case, dtype: str, shape: Shape, device: str) -> Row:
    kernel(case.kernel)
    torch.manual_seed(0)
    inputs = case.make(shape, dtype_of(dtype, device), device)
    if not case.rows_of:
        return _row(checking.check(case, inputs))
    return _row(checking.check_slices(case, inputs))


# --- unified, end to end --------------------------------------------------------------------------


def _models(settings: Settings) -> Iterator[Job]:
    for workload in (WORKLOADS[name] for name in MODELS):
        for level in LEVELS:
            yield _model(settings, workload, level, None, training=False)
        # Half precision is what users have on GPUs, and training runs through other graphs.
        yield _model(settings, workload, "O2", "bfloat16", training=False)
        if workload.trains:
            yield _model(settings, workload, "O2", None, training=True)
    for level, dtype, training in _OF_ZOO:
        for workload in zoo.workloads(_ZOO_BATCH):
            yield _model(settings, workload, level, dtype, training)


_ZOO_BATCH = 2
_OF_ZOO = (("O2", "bfloat16", False), ("O2", None, True), ("O3", "bfloat16", False))


def _model(
    settings: Settings, workload: Workload, level: str, dtype: str | None, training: bool
) -> Job:
    key = f"check/model-{workload.name}/{level}/{dtype or 'float32'}{'/training' * training}"
    if settings.quick:
        workload = replace(workload, build=partial(workload.build, small=True))
    return Job(key, partial(_check_model, workload, level, dtype, training, settings.device))


def _check_model(
    workload: Workload, level: str, dtype: str | None, training: bool, device: str
) -> Row:
    from kernel_dispatch import report
    from kernel_dispatch.bench.building import build
    from kernel_dispatch.bench.checking import Bound, WrongResult, check, establish

    if reason := workload.missing():
        raise Absent(reason)
    truth = establish(build(workload, 0, dtype, device, training).step)
    step = build(workload, 0, dtype, device, training).step
    options = {"level": level}
    compiled = torch.compile(step.case.fn, backend="unified", options=options)
    calls = step.with_fn(compiled)
    found: Row = {"note": truth.note}
    for number in range(1, 1 + _CALLS):
        outputs = calls.run()
        found["ran"] = ran(report(compiled))
        try:
            numerics = check(outputs, truth, Bound())
        except WrongResult as wrong:
            return {"status": WRONG, "reason": f"call {number}: {wrong}", **found}
        del outputs
        _soil(device)
    if numerics is not None:
        found |= {
            "error": numerics.error,
            "own_error": numerics.baseline_error,
            "bound": numerics.allowed,
        }
    return {"remark": _remark(found["ran"]), **found}


# In the first call memory is fresh from the system, which means zeros; at O3 the second call
# records a CUDA graph, and the third replays it.
_CALLS = 3


def _soil(device: str) -> None:
    """What was not written is not zero by chance: the memory that later calls get is NaN."""
    taken = [torch.full((1 << 24,), torch.nan, device=device) for _ in range(8)]
    del taken


def ran(graphs: Any) -> list[Row]:
    """Of each graph: who computed it, its regions and who took them, and what fell back."""
    kept = ("target", "provider", "runs", "regions", "fallbacks")
    return [{name: one.get(name) for name in kept} for one in graphs.as_dict()["graphs"]]


def _remark(ran: list[Row]) -> str:
    regions = {f"{r['region']}:{r['provider']}" for one in ran for r in one["regions"] or ()}
    fallen = sum(len(one["fallbacks"] or ()) for one in ran)
    return ", ".join(sorted(regions)) + (f"; {fallen} fallbacks" if fallen else "")


# --- the tests of the kernels ---------------------------------------------------------------------

# Backwards in this thread: see `checking.run`. The tests watch what is launched.
_RUN_PYTEST = (
    "import sys, pytest, torch; torch.autograd.set_multithreading_enabled(False); "
    "sys.exit(pytest.main(sys.argv[1:]))"
)


def _tests(settings: Settings) -> Iterator[Job]:
    """A row for each file. They run on the GPU where kernels are not interpreted."""
    folder = ROOT / "tests" / "kernels" / "triton"
    for path in sorted(folder.glob("test_*.py")):
        yield Job(f"check/pytest/{path.stem}", partial(_pytest, path, settings))
    if not folder.is_dir():
        yield Job("check/pytest", partial(_absent, "tests/kernels/triton is not here"))


def _absent(reason: str) -> Row:
    raise Absent(reason)


def _pytest(path: Path, settings: Settings) -> Row:
    more = ["--collect-only"] if settings.quick else ["--maxfail=30"]
    done = subprocess.run(
        [sys.executable, "-c", _RUN_PYTEST, str(path), "-q", "--no-header", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=0.95 * settings.row_seconds,  # ended from outside, it would leave its child behind
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-400:]]
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        return {"status": WRONG, "reason": lines[-1], "failed": failed}
    return {"remark": lines[-1]}
