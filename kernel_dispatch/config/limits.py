"""How much memory a provider has where the machine does not say: the seed's figures, and the like.

Asked only when the real query fails (`registry/measures.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Limits:
    """`memory`: of the device. `shared`: what a group of its threads shares, or a CPU's cache."""

    memory: int
    shared: int


_CUDA = Limits(2 * _GIB, 96 * _KIB)
_CPU = Limits(64 * _GIB, 32 * _MIB)

LIMITS: dict[str, Limits] = {
    "cuda": _CUDA,
    "cpu": _CPU,
    "mps": Limits(16 * _GIB, 64 * _KIB),
    "cudnn": _CUDA,
    "mkl": _CPU,
    "mkldnn": _CPU,
    "openmp": _CPU,
    # A NeuronCore of the second generation: 16 GiB of its own, 24 MiB of state buffer.
    "nki": Limits(16 * _GIB, 24 * _MIB),
    "triton": _CUDA,
    "cusparselt": _CUDA,
    "mha": _CPU,
    "nnpack": _CPU,
    "opt_einsum": _CPU,
    "xeon": _CPU,
}
