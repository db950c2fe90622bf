"""One provider at a time: all others are switched off, and the report has to say that it ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernel_dispatch
from benchmarks.workloads import WORKLOADS
from kernel_dispatch.bench.checking import Bound, check, establish
from kernel_dispatch.bench.stepping import Step

# Who is timed -> who may work beside it. Where Inductor may not, the rest runs in eager:
# it is the library that is timed.
PROVIDERS = {
    "eager": (),
    "inductor": (),
    "mkldnn": (),
    "mkl": (),
    "nnpack": (),
    "openmp": ("inductor",),
    "mha": ("inductor",),
}
WORKLOADS_OF_PROVIDERS = ("linear-gelu", "mlp-swiglu", "softmax", "conv-bn-relu", "attention")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("workload", WORKLOADS_OF_PROVIDERS)
def test_providers(benchmark: Any, workload: str, provider: str) -> None:
    benchmark.group = f"provider {workload}"
    torch.manual_seed(0)
    build = WORKLOADS[workload].build
    truth = establish(Step(build(), training=False))  # which uses it up
    torch.manual_seed(0)
    step = Step(build(), training=False)
    beside = PROVIDERS[provider]
    others = [name for name in PROVIDERS if name not in (provider, "eager", *beside)]
    level = "O2" if beside or provider == "inductor" else "O1"
    options = {"level": level, "disable": others}
    compiled = torch.compile(step.case.fn, backend="unified", options=options)
    candidate = step.with_fn(compiled)
    check(candidate.run(), truth, Bound())
    report = kernel_dispatch.report(compiled)
    ran = {graph.provider for graph in report}
    ran |= {region.provider for graph in report for region in graph.regions}
    if provider not in ran:
        pytest.skip(f"{provider} takes nothing of it here: see the capability table and doctor")
    benchmark(candidate.run)
