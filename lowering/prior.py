"""What to expect of a machine that was not measured, from its vendor and instruction set alone.

Small data with the reason beside it. Numbers are multiples of eager's rate: rough, and only there
to put providers in order. A measured profile (`lowering.profile`) takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowering.machine import CpuFacts
from lowering.profile import EAGER, SHAPES, RateKey

Multiples = Mapping[str, float]  # provider -> multiple of eager's rate


@dataclass(frozen=True)
class Expectation:
    """For products or convolutions of one dtype on one sort of CPU."""

    kind: str
    dtype: str
    multiples: Multiples
    why: str
    shapes: tuple[str, ...] = ()  # empty: all of the kind
    vendors: frozenset[str] = frozenset()  # empty: any
    any_isa: frozenset[str] = frozenset()  # at least one of these; empty: none is needed

    def holds_for(self, cpu: CpuFacts) -> bool:
        vendor = not self.vendors or cpu.vendor in self.vendors
        return vendor and (not self.any_isa or bool(self.any_isa & cpu.isa))

    def is_about(self, kind: str, dtype: str, shape: str) -> bool:
        return (self.kind, self.dtype) == (kind, dtype) and shape in (
            self.shapes or SHAPES.get(kind, ())
        )


@dataclass(frozen=True)
class Prior:
    """The expectations that hold for one CPU; answers the same questions as a profile."""

    expectations: tuple[Expectation, ...]

    def faster(self, kind: str, dtype: str, shape: str) -> list[str]:
        found = self._multiples(kind, dtype, shape)
        # Level ones stay in the order in which the data names them.
        return sorted(found, key=lambda provider: -found[provider])

    def speedup(self, key: RateKey, over: str = EAGER) -> float | None:
        found = self._multiples(key.kind, key.dtype, key.shape)
        rate, other = found.get(key.provider), found.get(over)
        return rate / other if rate and other else None

    def why(self, kind: str, dtype: str, shape: str) -> str:
        found = self._first(kind, dtype, shape)
        return found.why if found else ""

    def _multiples(self, kind: str, dtype: str, shape: str) -> Multiples:
        found = self._first(kind, dtype, shape)
        return {**found.multiples, EAGER: 1.0} if found else {}

    def _first(self, kind: str, dtype: str, shape: str) -> Expectation | None:
        return next((e for e in self.expectations if e.is_about(kind, dtype, shape)), None)


def prior(cpu: CpuFacts) -> Prior:
    """What holds for this CPU, the more special before the more general."""
    return Prior(tuple(one for one in EXPECTATIONS if one.holds_for(cpu)))


_AMD = frozenset({"amd"})
_AVX512 = frozenset({"avx512f"})
_MKL_ON_AMD = (
    "on AMD with AVX-512, MKL takes its generic path: 130-160 GFLOP/s where oneDNN reaches 210, "
    "and a quarter of its rate on few rows (measured: 2 cores of Zen 4, torch 2.13)"
)
_X86 = frozenset({"avx2"})
_ARM = frozenset({"neon"})
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_PACKED = "the weight is laid out once instead of in every call"

EXPECTATIONS: tuple[Expectation, ...] = (
    Expectation(
        "gemm",
        "float32",
        {"openmp": 3.0, "mkldnn": 3.0, "mkl": 1.0},
        _MKL_ON_AMD,
        shapes=("vector", "small"),
        vendors=_AMD,
        any_isa=_AVX512,
    ),
    Expectation(
        "gemm",
        "float32",
        {"openmp": 1.4, "mkldnn": 1.4, "mkl": 1.0},
        _MKL_ON_AMD,
        vendors=_AMD,
        any_isa=_AVX512,
    ),
    Expectation(
        "gemm",
        "float32",
        {"openmp": 1.0, "mkl": 1.0, "mkldnn": 1.0},
        "with AVX2 only, and on Intel, MKL and oneDNN reach the same rate within a few percent",
        any_isa=_X86,
    ),
    Expectation(
        "gemm",
        "float32",
        {"mkldnn": 1.2},
        f"on ARM oneDNN brings the Compute Library's kernels, and {_PACKED}",
        any_isa=_ARM,
    ),
    Expectation(
        "gemm",
        "bfloat16",
        {"openmp": 1.1, "mkldnn": 1.1},
        "both use the CPU's own products and have the weight laid out once; level within a few "
        "percent on 128 rows, ours ahead on few (measured: one core of Zen 4, torch 2.13)",
        vendors=_AMD,
        any_isa=frozenset({"avx512_bf16"}),
    ),
    Expectation(
        "gemm",
        "bfloat16",
        {"openmp": 1.5, "mkldnn": 1.1},
        "tiles of AMX in both; ours take 0.5 to 0.9 of oneDNN's time, the weight laid out once in "
        "both (measured: 2 cores of a Xeon, torch 2.13)",
        any_isa=frozenset({"amx_bf16"}),
    ),
    Expectation(
        "gemm",
        "bfloat16",
        {"mkldnn": 1.1},
        f"eager uses oneDNN too where the CPU multiplies bfloat16 itself; {_PACKED}",
        any_isa=_BF16,
    ),
    Expectation(
        "conv",
        "float32",
        {"openmp": 1.6, "mkldnn": 1.5},
        f"oneDNN computes eager's convolutions too; channels last, and {_PACKED}",
        any_isa=_X86 | _ARM,
    ),
    Expectation(
        "conv",
        "bfloat16",
        {"mkldnn": 1.1},
        f"eager uses oneDNN too where the CPU multiplies bfloat16 itself; {_PACKED}",
        any_isa=_BF16,
    ),
    Expectation(
        "gemm",
        "float16",
        {"openmp": 1.5, "mkldnn": 1.1},
        "tiles of AMX, as for bfloat16, in eager too; a text encoder takes 0.58 and 0.77 of its "
        "time (measured: 2 cores of a Xeon, torch 2.13)",
        any_isa=frozenset({"amx_fp16"}),
    ),
    Expectation(
        "gemm",
        "float16",
        {"openmp": 5.0},
        "eager multiplies float16 with kernels for single numbers; widened to float32 once, the "
        "weight goes through fast ones",
    ),
    Expectation(
        "conv",
        "float16",
        {"openmp": 1.5, "mkldnn": 1.1},
        "tiles of AMX, as for bfloat16, in eager too; ResNet-50 takes 0.25 and 0.45 of its time "
        "(measured: 2 cores of a Xeon, torch 2.13)",
        any_isa=frozenset({"amx_fp16"}),
    ),
    Expectation(
        "conv",
        "float16",
        {"openmp": 5.0},
        "eager multiplies float16 with kernels for single numbers; widened to float32 once, the "
        "weight goes through fast ones",
    ),
)
