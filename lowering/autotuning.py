"""A graph that does not compile with Inductor's measured kernels is compiled without them.

`max_autotune` brings templates that stock graphs break: on CPUs a batched product whose result is
viewed in other dimensions ends in an assertion (torch 2.13). What O2 computes, O3 must, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from lowering.graphs import clone
from lowering.reasons import Reason

_SWITCHES = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")


def or_without(compile_graph: Any, noted: Callable[[Reason], None]) -> Any:
    """Inductor's compile function, with a second attempt wherever a first one measures kernels."""
    from torch._inductor import config

    def inner_compile(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        switched_on = [name for name in _SWITCHES if getattr(config, name, False)]
        if not switched_on:
            return compile_graph(gm, example_inputs, **kwargs)
        untouched = clone(gm)
        try:
            return compile_graph(gm, example_inputs, **kwargs)
        except Exception as error:  # noqa: BLE001  a second failure is raised
            with config.patch(dict.fromkeys(switched_on, False)):
                compiled = compile_graph(untouched, example_inputs, **kwargs)
            noted(Reason("autotuning-failed", _headline(error)))
            return compiled

    return inner_compile


def _headline(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    return f"compiled without max_autotune, with which Inductor raised: {text}"
