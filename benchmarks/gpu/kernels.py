"""`kernels`: each kernel beside its rivals, on one shape, in one dtype, in one direction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import checking, targets
from benchmarks.gpu.case import (
    BACKWARD,
    EIGHT_BITS,
    FORWARD,
    Absent,
    Case,
    Function,
    Inputs,
    Rival,
    Shape,
    dtype_of,
    kernel,
)
from benchmarks.gpu.cases import ALL
from benchmarks.gpu.results import FAILED, WRONG, Job, Results, Row
from benchmarks.gpu.rivals import EAGER, OURS, inductor, max_autotune, plain
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.supervising import one_line
from benchmarks.gpu.timing import Call, Clock, Rates, Summary, clock, peak_bytes

RATES = "kernels/rates"


def jobs(settings: Settings) -> list[Job]:
    """The first shape of every case comes before the second of any: a call may end early."""
    found = [job for case in ALL for job in _of_case(settings, case)]
    found.sort(key=lambda pair: pair[0])
    return [Job(RATES, partial(_rates, settings)), *(job for _, job in found)]


def _of_case(settings: Settings, case: Case) -> Iterator[tuple[int, Job]]:
    shapes = (case.tiny,) if settings.quick else case.shapes
    wanted = settings.dtypes or ("bfloat16", *EIGHT_BITS)
    known = case.dtypes_on(settings.device)
    # Where bfloat16 cannot be run, something has to show that the rest can.
    dtypes = [name for name in known if name in wanted] or known[:1] * (not settings.measures)
    for number, shape in enumerate(shapes):
        for dtype in dtypes:
            for direction in case.directions:
                key = f"kernels/{case.name}/{direction}/{dtype}/{'x'.join(map(str, shape))}"
                run = partial(_compare, settings, case, shape, dtype, direction)
                yield number, Job(key, run)


def _rates(settings: Settings) -> Row:
    rates = Rates.measure(settings.device, settings.quick)
    remark = f"copy {rates.copy / 1e12:.2f} TB/s, product {rates.product / 1e12:.0f} TFLOP/s"
    return {"remark": remark, **asdict(rates)}


def rates_of(results: Results) -> Rates:
    row = results.get(RATES) or {}
    if "copy" not in row:
        raise RuntimeError(f"the rates of this card are not measured: {row.get('reason', '')}")
    return Rates(row["copy"], row["product"])


# --- one row --------------------------------------------------------------------------------------


def _compare(settings: Settings, case: Case, shape: Shape, dtype: str, direction: str) -> Row:
    kernel(case.kernel)
    rates = rates_of(Results(settings.json))
    torch.manual_seed(0)
    inputs = case.make(shape, dtype_of(dtype, settings.device), settings.device)
    work = case.work(shape, {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1), direction)
    contenders: targets.Contenders = {}
    watch = clock(settings.device, settings.quick)
    with _saved_tensors_kept(), watch.here():
        calls = _prepared(settings, case, inputs, direction, contenders)
        if OURS in calls:
            _time(watch, calls, contenders, settings.device)
    for one in contenders.values():
        if "device_us" in one:
            one |= targets.shares(work, one["device_us"], rates)
    found: Row = {
        "case": case.name,
        "direction": direction,
        "dtype": dtype,
        "shape": list(shape),
        "bytes": work.bytes,
        "flops": work.flops,
        "contenders": contenders,
    }
    if settings.measures:
        found["targets"] = targets.met(case, shape, direction, work, contenders)
    return {**found, **_status(contenders)}


@contextlib.contextmanager
def _saved_tensors_kept() -> Iterator[None]:
    """A backward is timed again and again, so Inductor's must not reuse what its forward saved."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield


def _all(case: Case) -> list[Rival]:
    compiled = [inductor(case.own), max_autotune(case.own)] if case.compiles else []
    return [plain(EAGER, case.own), plain(OURS, case.ours), *compiled, *case.rivals]


def _prepared(
    settings: Settings,
    case: Case,
    inputs: Inputs,
    direction: str,
    contenders: targets.Contenders,
) -> dict[str, Call]:
    """What is called for each contender; those that cannot, or are wrong, leave their reason."""
    truth = None
    calls: dict[str, Call] = {}
    for rival in _all(case):
        if rival.name in settings.without:
            continue
        try:
            function, mine = rival.make(), _inputs(inputs, rival)
            got = checking.of_direction(_viewed(case, function), mine, direction)
            truth = got if rival.name == EAGER else truth
            contenders[rival.name] = {}
            if truth is not None and _is_whole(rival) and not checking.is_near(got, truth):
                contenders[rival.name] = {"status": WRONG, "reason": "not what eager computes"}
                continue
            calls[rival.name] = call_of(function, mine, direction)
        except Absent as absent:
            contenders[rival.name] = {"status": "absent", "reason": str(absent)}
        except Exception as error:  # noqa: BLE001  (a rival that fails is no reason to stop)
            contenders[rival.name] = {"status": FAILED, "reason": one_line(error)}
    return calls


def _is_whole(rival: Rival) -> bool:
    """Computes the same; the product alone does not, it is there to be compared with."""
    return rival.name != "cublas"


def _viewed(case: Case, function: Function) -> Function:
    return lambda *inputs: case.view(function(*inputs))


def _inputs(inputs: Inputs, rival: Rival) -> Inputs:
    if not rival.clones:
        return inputs
    return tuple(
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    )


def call_of(function: Function, inputs: Inputs, direction: str) -> Call:
    """Forward without history; backward of one forward, again and again; or both together."""
    if direction == FORWARD:

        def forward() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return forward
    if direction == BACKWARD:
        return _backward(function, inputs)
    return _step(function, inputs)


def _step(function: Function, inputs: Inputs) -> Call:
    outputs = checking.differentiable(checking.run(function, inputs)[0])
    given = [checking.incoming(output, seed) for seed, output in enumerate(outputs)]
    return lambda: checking.run(function, inputs, given)


def _backward(function: Function, inputs: Inputs) -> Call:
    fresh = [checking.leaf(value) for value in inputs]
    outputs = checking.differentiable(function(*fresh))
    given = [checking.incoming(output, seed) for seed, output in enumerate(outputs)]
    wanted = checking.wanting(fresh)

    def backward() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)

    return backward


def _time(
    watch: Clock, calls: dict[str, Call], contenders: targets.Contenders, device: str
) -> None:
    """Memory first: graphs keep what they allocate."""
    replays = {}
    for name, call in list(calls.items()):
        try:
            call()
            contenders[name]["peak_bytes"] = peak_bytes(call, device)
            replays[name], contenders[name]["how"] = watch.ready(call)
        except Exception as error:  # noqa: BLE001
            contenders[name] = {"status": FAILED, "reason": one_line(error)}
            del calls[name]
    for name, samples in watch.seconds(replays).items():
        device_time = Summary.of(samples)
        contenders[name] |= {"device_us": device_time.median, "device": asdict(device_time)}
    for name, (returned, done) in watch.waiting(calls).items():
        contenders[name] |= {
            "host_us": Summary.of(returned).median,
            "wall_us": Summary.of(done).median,
        }


def _status(contenders: targets.Contenders) -> Row:
    """Ours decides; the others may fail."""
    ours = contenders.get(OURS, {})
    if "device_us" in ours:
        return {"remark": f"{ours['device_us']:.1f} us"}
    return {key: ours[key] for key in ("status", "reason") if key in ours}
