"""The CPU: always here, and the place where every other target's refusals end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowering import machine
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level


def probe() -> Probe:
    """Never absent; the details are what rows and `doctor` want to know of it."""
    facts = machine.cpu()
    return Probe.yes(
        facts.model,
        vendor=facts.vendor,
        features=sorted(facts.isa | {facts.vendor}),
        effective_cores=facts.effective_cores,
        memory_bytes=facts.memory_bytes,
    )


def inductor_config(level: Level) -> Mapping[str, Any]:
    """At O3 Inductor may time its own alternatives; below it, its defaults are kept."""
    return {"max_autotune": True} if level >= Level.O3 else {}


# Inductor 2.13 gives a wrong pseudo-inverse of a complex matrix, without a word, and its backward
# of these factorisations and solvers raises (the op sweep found both). Nothing to fuse in them.
_WRONG_ON_COMPLEX = frozenset(
    "pinverse linalg_pinv lu lu_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex "
    "linalg_lu_solve".split()
)

TARGET = Target(
    name="cpu",
    summary="Any CPU that torch runs on, through Inductor, oneDNN and eager",
    device_types=("cpu",),
    probe=probe,
    aliases=("host", "x86", "arm"),
    priority=10,
    proven_on="x86-64 (AMD EPYC), Linux",
    inductor_config=inductor_config,
    rows=(
        CapabilityRow(
            "cpu",
            "inductor",
            GRAPH,
            Level.O2,
            priority=50,
            refused_complex_ops=_WRONG_ON_COMPLEX,
            min_ops=2,
            min_bytes=1 << 20,
            why="one op on little data has nothing to fuse: a 64x64 linear or softmax takes 10 us "
            "longer per call in Inductor's code than in eager, and 60 us longer with gradients "
            "(measured: 2 cores of an AMD EPYC with AVX2, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16"}),
            training=False,
            min_flops=1 << 16,
            why="TODO",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16"}),
            training=False,
            why="TODO",
        ),
        CapabilityRow(
            "cpu",
            "mha",
            "attention",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
            training=False,
            why="TODO",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "linear",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32", "bfloat16"}),
            training=False,
            features=frozenset({"amd", "avx512f"}),
            min_flops=4 << 20,
            why="on AMD with AVX-512 oneDNN reaches twice the rate of MKL (469 against 207 GFLOP/s "
            "at 512x1024x4096); on AMD with AVX2 only, MKL is level or ahead; below some million "
            "FLOPs the call costs more than it saves",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "convolution",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32", "bfloat16"}),
            training=False,
            min_flops=4 << 20,
            why="TODO",
        ),
        CapabilityRow("cpu", "eager", GRAPH, Level.O0, why="takes everything that torch takes"),
    ),
)
