"""What has to be right in a training graph before it is parted into forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from lowering import changed_inputs, extremes
from lowering.replacing import replaced


def put_right() -> AbstractContextManager[None]:
    """For the time in which AOTAutograd parts graphs."""
    from torch._inductor import compile_fx

    def making(partition: Callable[..., Any]) -> Callable[..., Any]:
        def partitioned(
            joint: fx.GraphModule, *args: Any, num_fwd_outputs: int, **kwargs: Any
        ) -> Any:
            changed_inputs.read_once(joint.graph, num_fwd_outputs)
            extremes.put_right(joint.graph)
            return partition(joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs)

        return partitioned

    return replaced(compile_fx, "min_cut_rematerialization_partition", making)
