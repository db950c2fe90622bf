"""The only place that imports Triton, and what stands in for it where it is not installed.

Kernels are defined either way, so that `triton_kernels` can be imported, read and used (with the
plain torch meaning of every operation) on a machine without Triton.
"""

from __future__ import annotations

from typing import Any

from triton_kernels.availability import interpreting

ABSENT = ""  # why Triton cannot be imported; empty if it can

try:
    import triton
    import triton.language as tl
    from triton import jit
except Exception as error:  # noqa: BLE001  (a broken build can raise anything on import)
    ABSENT = f"triton does not import: {type(error).__name__}: {error}"
    triton = tl = None

    def jit(function: Any) -> Any:
        """A kernel that nobody can launch."""
        return function


# Decided when kernels are defined, as Triton itself decides it.
INTERPRETED = not ABSENT and interpreting()

__all__ = ["ABSENT", "INTERPRETED", "jit", "tl", "triton"]
