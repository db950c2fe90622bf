"""Reasons: why something was not chosen, or did not work. A "no" is a value and reaches the report.

The code is stable (users filter and test on it), the text is for people, the place is the user's
own file and line where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

# code -> what it means and what the user can do about it; the documentation's table is made of it.
CODES: dict[str, str] = {
    "target-absent": "The target's hardware or runtime is not on this machine; see `doctor`.",
    "not-requested": "Another device was forced by an option, the context or the environment.",
    "tensors-elsewhere": "Graphs follow their tensors, and these live on another device.",
    "no-target": "No target of this machine takes the graph as it is.",
    "no-lowering": "The target is known, but this version has no lowering for it.",
    "level-too-low": "The row may be used from a higher level on; raise `level`.",
    "provider-absent": "The provider's library or compiler is missing or does not work.",
    "provider-disabled": "Switched off by `disable`, by the choice of another `provider`, or by "
    "the file that UNIFIED_CONFIG names.",
    "dtype-unsupported": "The row does not take one of the dtypes in the graph.",
    "op-unsupported": "The row does not take one of the ops in the graph.",
    "training-unsupported": "The row takes inference only, and this graph needs gradients.",
    "dynamic-unsupported": "The row takes static shapes only.",
    "mutation-unsupported": "The graph writes into its inputs, which this row or move excludes.",
    "subclass-unsupported": "The row does not take tensor subclasses.",
    "arch-unsupported": "The row needs an instruction set or architecture that is not here.",
    "shape-unsupported": "The row does not take regions of this shape; another row is faster.",
    "too-small": "The graph is so small that a compiled call costs more than it saves.",
    "over-tolerance": "In fewer bits it would be, or was, further off than `tolerance` allows.",
    "lower-priority": "Another provider that also takes it comes first.",
    "compile-failed": "The lowering raised while compiling; the next provider took over.",
    "autotuning-failed": "Inductor raised with the measured kernels of O3; the graph was compiled "
    "without them, as at O2.",
    "run-failed": "The compiled graph raised when it ran; eager took over for this graph.",
    "out-of-memory": "The compiled graph ran out of device memory; eager took over.",
    "internal-error": "A bug of kernel_dispatch itself; the graph runs eagerly. Please report it.",
    "refused-at-run": "A region's kernel refused its actual inputs; plain torch computed it.",
    "placement-refused": "The graph cannot be moved to the forced device.",
    "recompile-limit": "Dynamo reaches its recompile limit; further shapes run uncompiled.",
    "graph-break": "Dynamo ended the graph there; the code between graphs runs as plain Python.",
    "frame-skipped": "Dynamo gave up on a function; it runs as plain Python, uncompiled.",
    "never-called": "Dynamo handed no graph to the backend.",
    "unexpected-kwargs": "Torch handed keyword arguments that this version does not know.",
}


@dataclass(frozen=True)
class Reason:
    """One "no": a stable code, a sentence, and the user's file:line where known."""

    code: str
    text: str
    place: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise AssertionError(f"reason code {self.code!r} is not in lowering.reasons.CODES")

    def __str__(self) -> str:
        at = f" [{self.place}]" if self.place else ""
        return f"{self.code}: {self.text}{at}"

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text, "place": self.place}
