"""The backend, as torch finds it by its name: `torch.compile(model, backend="unified")`.

Torch looks names up without a lock. Of several threads that compile for the first time at once,
each that asks while another is loading this module fails with "duplicate name: unified". So this
module loads next to nothing: what does the work is imported with the first graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_dispatch import capturing

if TYPE_CHECKING:
    from torch import fx

    from lowering.contract import Graph


def unified(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown_kwargs: Any,
) -> Graph:
    """`torch.compile(model, backend="unified")` ends up here, once for every graph.

    Keyword arguments that a newer torch adds are accepted and noted in the report.
    """
    from kernel_dispatch import pipeline

    return pipeline.compile_graph(gm, example_inputs, mode, options, unknown_kwargs)


def reset() -> None:
    """Called by torch.compiler.reset(): forget graphs and what was asked of the machine."""
    from kernel_dispatch import pipeline

    pipeline.forget()


def register() -> None:
    """Make torch know the name "unified" now: for a checkout that is not installed, and for
    programs whose threads compile at once. As often as you like; what is installed is found anyway.
    """
    from torch._dynamo.backends import registry

    with _registering:
        if "unified" not in registry.list_backends(exclude_tags=()):
            registry.register_backend(unified, name="unified")
        registry.lookup_backend("unified")


_registering = threading.Lock()

unified.reset = reset  # type: ignore[attr-defined]
capturing.watch(unified)
