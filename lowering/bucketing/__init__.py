"""One compiled graph for many sizes: pad to the next bucket, run a graph of fixed sizes, crop.

plan(module) -> Bucketing, or a Reason why padding could change a result
Bucketed(bucketing, compile, sizes) -> the callable
"""

from lowering.bucketing.bucketing import Bucketing, Key
from lowering.bucketing.decomposing import decompositions
from lowering.bucketing.planning import plan
from lowering.bucketing.running import Bucketed
from lowering.bucketing.sizes import next_size

__all__ = ["Bucketed", "Bucketing", "Key", "decompositions", "next_size", "plan"]
