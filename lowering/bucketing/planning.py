"""Can this graph run in buckets? The proof is a trial: every operator by its rule, without data."""

from __future__ import annotations

from torch import fx

from lowering.bucketing.bucketing import Bucketing
from lowering.bucketing.refused import Refused
from lowering.graphs import place
from lowering.reasons import Reason

_CODE = "dynamic-unsupported"


def plan(module: fx.GraphModule) -> Bucketing | Reason:
    """An inference graph of AOTAutograd's in buckets, or the one sentence why it cannot be.

    Reads the graph without adding a guard and changes nothing in it.
    """
    try:
        bucketing = Bucketing(module)
        if not bucketing.symbols:
            return Reason(_CODE, "no buckets: no size of this graph varies")
        bucketing.try_out()
    except Refused as no:
        if no.node is None:
            return Reason(_CODE, f"no buckets: {no.text}")
        return Reason(_CODE, f"no buckets: {no.node.target}: {no.text}", place(no.node))
    return bucketing
