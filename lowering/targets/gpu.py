"""What CUDA and ROCm share: names for what an architecture can do, and capability rows.

Figures with "H100" are ours: `docs/results/gpu` has the runs; others are published ones.
"""

from __future__ import annotations

from lowering.capability import GRAPH, CapabilityRow
from lowering.levels import Level

HALF = frozenset({"float16", "bfloat16"})
FLOATS = HALF | {"float32"}
_FLOORS = (80, 89, 90, 100)  # architectures of NVIDIA from which on something more is there
_CDNA = ("gfx90a", "gfx942", "gfx950")


def features_of(architecture: str) -> frozenset[str]:
    """What rows may ask for: the name itself, "sm89+" for it and all newer ones, "cdna", "fp8"."""
    found = {architecture}
    if architecture.startswith("sm"):
        number = int(architecture[2:] or 0)
        found |= {f"sm{floor}+" for floor in _FLOORS if number >= floor}
        found |= {"fp8"} if number >= 89 else set()
    elif architecture.startswith("gfx"):
        found |= {"cdna"} if architecture in _CDNA else {"rdna"}
        found |= {"fp8"} if architecture in _CDNA[1:] else set()
    return frozenset(found)


def shared_rows(target: str, tensor_cores: str, decoding: int) -> tuple[CapabilityRow, ...]:
    """Rows that hold for both makers. `tensor_cores`: the feature that our products ask for;
    `decoding`: the priority of our kernel for a step of it, beside torch's own with 40."""

    def row(
        provider: str, region: str, level: Level, priority: int, **limits: object
    ) -> CapabilityRow:
        return CapabilityRow(target, provider, region, level, priority, **limits)  # type: ignore[arg-type]

    return (
        row("inductor", GRAPH, Level.O2, 50, needs=frozenset({"triton"}), negated=False,
            why="Inductor fuses into Triton kernels, which saves launches and memory traffic"),
        row("triton", "attention", Level.O2, decoding, dtypes=HALF, training=False, early=True,
            shape_classes=frozenset({"decode"}), features=frozenset({tensor_cores}),
            why="one step of decoding reads the cache once for all heads of a group, on all units "
            "at once; on NVIDIA's GPUs torch's kernels do as well and are launched faster (H100: "
            "401 us, flash 407, cuDNN 363), so there it is taken by name only"),
        row("mha", "attention", Level.O1, 40, early=True,
            why="torch's own kernels; ours does not beat them where there are many queries (H100: "
            "8.1 ms where cuDNN takes 5.0)"),
        row("triton", "linear_cross_entropy", Level.O2, 80, dtypes=FLOATS, early=True,
            min_ops=2, min_bytes=1 << 30,
            why="logits of a GiB or more are never held: a few thousand tokens at a time go "
            "through cuBLAS and one kernel that gives the loss and its gradient (H100, 8192 x 4096 "
            "x 128256: 38.8 ms and 3.1 GB, Inductor 37.5 and 4.0, eager 40.8 and 6.0)"),
        row("triton", "cross_entropy", Level.O2, 70, dtypes=FLOATS, early=True,
            shape_classes=frozenset({"wide"}),
            why="from 65536 classes on Inductor reads the logits twice for the loss (H100, 8192 x "
            "128256: 838 us against its 1349, backward 1301 against 1533)"),
        row("inductor", "cross_entropy", Level.O2, 10, early=True,
            why="below 65536 classes Inductor's kernel keeps a row in registers as ours does"),
        row("inductor", "rope", Level.O2, 10,
            why="a rotation fuses with its neighbours in Inductor, norms of heads too; a kernel of "
            "ours is 5-9% faster on the device and waits longer for its launch (H100)"),
        row("triton", "linear", Level.O3, 60, dtypes=HALF, training=False, error=0.01, early=True,
            shape_classes=frozenset({"vector", "small"}), min_flops=1 << 22,
            why="few rows are bound by reading the weight, half as long in int8 (H100, one row: 47 "
            "us, bfloat16 55); each layer is checked on its first inputs"),
        row("triton", "linear", Level.O3, 55, dtypes=HALF, training=False, error=0.04, early=True,
            shape_classes=frozenset({"large"}), features=frozenset({"fp8"}), min_flops=1 << 30,
            why="8-bit floats are multiplied faster (H100, 8192^3: 905 us, bfloat16 1477); three "
            "digits are off by some 4%, so tolerance=0.05 or so has to allow it"),
        row("inductor", "linear", Level.O2, 10, early=True,
            why="large products stay with the vendor's library, which is ahead of Triton (H100, "
            "8192^3 with gelu: 1.58 ms against 1.80)"),
        row("inductor", "norm", Level.O2, 10,
            why="Inductor's norm takes the residual with it; hand-written kernels gain nothing "
            "there once rows are read once (H100)"),
        row("inductor", "gated", Level.O2, 10,
            why="Inductor's kernel is at the memory's rate; a hand-written one equals it to the "
            "microsecond (published)"),
        row("inductor", "embedding", Level.O2, 10, early=True,
            why="a gather at the memory's rate, which fuses with what follows it"),
        row("eager", GRAPH, Level.O0, 0, why="takes everything that torch takes"),
    )  # fmt: skip
