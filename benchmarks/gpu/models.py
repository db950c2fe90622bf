"""`models`: whole models in bfloat16, eager and Inductor beside `unified` at its levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import checking, zoo
from benchmarks.gpu.case import Absent
from benchmarks.gpu.check import ran
from benchmarks.gpu.results import FAILED, WRONG, Job, Row
from benchmarks.gpu.rivals import EAGER, entry
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.supervising import one_line
from benchmarks.gpu.timing import Call, Clock, Summary, clock, peak_bytes
from benchmarks.workloads import cnn, llama, text_encoder, vision_transformer
from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload
from kernel_dispatch.bench.building import build

LEVELS = ("O0", "O1", "O2", "O3")
# Of the time of a row, so much has to be left for another contender to be compiled.
_LEFT_FOR_ONE = 0.3
# Logits of random models in bfloat16 differ by about a percent from run to run of other kernels.
_NEAR = 0.1


@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[bool], Case]
    summary: str
    needs: tuple[str, ...] = ()


def _bert(small: bool) -> Case:
    sizes = (
        replace(text_encoder.SMALL, batch=2)
        if small
        else replace(text_encoder.BASE, batch=32, tokens=512)
    )
    model = draw(text_encoder.TextEncoder(sizes))
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens))
    lengths = torch.randint(sizes.tokens // 2, sizes.tokens, (sizes.batch, 1))
    return Case(model, (tokens, torch.arange(sizes.tokens) < lengths))


def _pictures(case: Case, count: int) -> Case:
    (picture,) = case.args
    return Case(case.fn, (picture + 0.1 * torch.randn(count, *picture.shape[1:]),))


def _vit(small: bool) -> Case:
    return _pictures(vision_transformer.vision_transformer(small), 2 if small else 64)


def _resnet(small: bool) -> Case:
    return _pictures(cnn.cnn(small), 2 if small else 64)


# The layout of Llama-3.2-1B.
_LLAMA_1B = llama.Sizes(
    vocabulary=128256, width=2048, hidden=8192, heads=32, key_heads=8, layers=16, tokens=2048,
    cache=4096, position=3000,
)  # fmt: skip


def _prefill(small: bool) -> Case:
    sizes = llama.SMALL if small else _LLAMA_1B
    tokens = torch.randint(sizes.vocabulary, (1 if small else 4, sizes.tokens))
    return Case(draw(llama.Llama(sizes)), (tokens,))


def _decode(small: bool) -> Case:
    sizes = llama.SMALL if small else _LLAMA_1B
    model = draw(llama.Llama(sizes, sizes.cache)).requires_grad_(False)
    return Case(model, (torch.randint(sizes.vocabulary, (1, 1)), torch.tensor([sizes.position])))


MODELS = (
    Model("bert", _bert, "BERT-base, 32 padded texts of 512 tokens"),
    Model("llama-decode", _decode, "Llama 1B, one token, static cache of 4096, 3000 filled"),
    Model("vit", _vit, "ViT-base, 64 images of 224x224"),
    Model("llama-prefill", _prefill, "Llama 1B, 4 prompts of 2048 tokens"),
    Model("resnet-50", _resnet, "ResNet-50, 64 images of 224x224"),
)

_ZOO_BATCH = 16  # far from the largest, enough for kernels to be longer than their launch


def jobs(settings: Settings) -> list[Job]:
    dtypes = settings.dtypes or ("bfloat16" if settings.measures else "float32",)
    zoo_models = (
        Model(one.name, one.build, one.summary, one.needs) for one in zoo.workloads(_ZOO_BATCH)
    )
    return [
        Job(f"models/{model.name}/{dtype}", partial(_compare, settings, model, dtype))
        for model in (*MODELS, *zoo_models)
        for dtype in dtypes
    ]


# --- one row --------------------------------------------------------------------------------------


def contenders(settings: Settings) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The longest to compile last: where time runs out, it is what is missing."""
    yield EAGER, lambda fn: fn
    for level in LEVELS:
        options = {"level": level}
        yield f"unified-{level}", partial(torch.compile, backend="unified", options=options)
    yield "inductor", partial(torch.compile, dynamic=False)
    if settings.measures:
        yield "inductor-cudagraphs", partial(torch.compile, dynamic=False, mode="reduce-overhead")
    if settings.measures:
        yield "inductor-max-autotune", partial(torch.compile, dynamic=False, mode="max-autotune")


def _compare(settings: Settings, model: Model, dtype: str) -> Row:
    end = time.monotonic() + settings.row_seconds
    workload = Workload(
        model.name, partial(model.build, settings.quick), model.summary, needs=model.needs
    )
    if reason := workload.missing():
        raise Absent(reason)
    case = build(workload, 0, dtype, settings.device, training=False).step.case
    found: dict[str, dict[str, Any]] = {}
    watch = clock(settings.device, settings.quick)
    with watch.here(), torch.no_grad():
        calls = _prepared(settings, case, found, end)
        _time(settings, watch, calls, found)
    return {
        "model": model.name,
        "summary": model.summary,
        "dtype": dtype,
        "contenders": found,
        **_status(found),
    }


def _prepared(
    settings: Settings, case: Case, found: dict[str, dict[str, Any]], end: float
) -> dict[str, Call]:
    from kernel_dispatch import report

    calls: dict[str, Call] = {}
    truth = None
    for name, prepare in contenders(settings):
        if name in settings.without:
            continue
        if name != EAGER and end - time.monotonic() < _LEFT_FOR_ONE * settings.row_seconds:
            found[name] = {"status": "absent", "reason": "no time left in this row to compile it"}
            continue
        start = time.perf_counter()
        try:
            compiled = prepare(entry(case.fn, name))
            call = partial(compiled, *case.args)
            got = _copied(call())
            found[name] = {"first_call_s": round(time.perf_counter() - start, 2)}
            truth = got if name == EAGER else truth
            if truth is not None and not checking.is_near(got, truth, _NEAR):
                found[name] |= {"status": WRONG, "reason": "not what eager computes"}
                continue
            if name.startswith("unified"):
                found[name]["ran"] = ran(report(compiled))
            calls[name] = call
        except Exception as error:  # noqa: BLE001  (a contender that fails is no reason to stop)
            found[name] = {"status": FAILED, "reason": one_line(error)}
    return calls


def _copied(outputs: Any) -> list[torch.Tensor]:
    """What a graph of Inductor's returns is overwritten by its next call."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [one.clone() for one in leaves if isinstance(one, torch.Tensor)]


def _time(
    settings: Settings, watch: Clock, calls: dict[str, Call], found: dict[str, dict[str, Any]]
) -> None:
    """As users call it, not in graphs of ours: where the host is slower, that is in both times."""
    for name, call in list(calls.items()):
        try:
            for _ in range(2):
                call()
            found[name]["peak_bytes"] = peak_bytes(call, settings.device)
        except Exception as error:  # noqa: BLE001
            found[name] = {"status": FAILED, "reason": one_line(error)}
            del calls[name]
    if not calls:
        return
    for name, samples in watch.seconds(calls).items():
        device_time = Summary.of(samples)
        found[name] |= {"device_us": device_time.median, "device": asdict(device_time)}
    for name, (returned, done) in watch.waiting(calls).items():
        found[name] |= {"host_us": Summary.of(returned).median, "wall_us": Summary.of(done).median}


def _status(found: dict[str, dict[str, Any]]) -> Row:
    bad = {
        name: one["reason"] for name, one in found.items() if one.get("status") in (WRONG, FAILED)
    }
    ours = {name: reason for name, reason in bad.items() if name.startswith("unified")}
    if not ours:
        return {
            "remark": ", ".join(
                f"{n}: {one['wall_us'] / 1e3:.2f} ms"
                for n, one in found.items()
                if "wall_us" in one
            )
        }
    status = WRONG if all(found[name]["status"] == WRONG for name in ours) else FAILED
    return {"status": status, "reason": "; ".join(f"{n}: {r}" for n, r in ours.items())}
