"""What stands in padded positions where an operator mixes along a padded dimension.

One entry for each operator and operand. Every fill goes through this table, and the tests take out
each entry in turn to see that a result becomes wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch


class Neutral(enum.Enum):
    ZERO = "zero"
    ONE = "one"
    LEAST = "the least number of the dtype"
    GREATEST = "the greatest number of the dtype"
    GIVEN = "the number that the operator itself pads with"


ZERO, ONE, LEAST, GREATEST, GIVEN = Neutral

NEUTRAL: Mapping[str, tuple[Neutral, ...]] = {
    # garbage times zero may be NaN, so both sides of a product
    "mm": (ZERO, ZERO),
    "bmm": (ZERO, ZERO),
    "addmm": (ZERO, ZERO),
    "baddbmm": (ZERO, ZERO),
    "mv": (ZERO, ZERO),
    "dot": (ZERO, ZERO),
    "convolution": (ZERO,),
    "sum": (ZERO,),
    "nansum": (ZERO,),
    "mean": (ZERO,),
    "var": (ZERO, ZERO),  # what is summed to the mean; the squares
    "linalg_vector_norm": (ZERO,),
    "count_nonzero": (ZERO,),
    "any": (ZERO,),
    "all": (ONE,),
    "prod": (ONE,),
    "amax": (LEAST,),
    "max": (LEAST,),
    "argmax": (LEAST,),
    "logsumexp": (LEAST,),
    "_softmax": (LEAST,),
    "_safe_softmax": (LEAST,),
    "_log_softmax": (LEAST,),
    "amin": (GREATEST,),
    "min": (GREATEST,),
    "argmin": (GREATEST,),
    "constant_pad_nd": (GIVEN,),
    # positions to read from, which have to exist
    "embedding": (ZERO,),
    "index": (ZERO,),
    "index_select": (ZERO,),
    "gather": (ZERO,),
    "scatter": (ZERO,),
    "scatter_add": (ZERO,),
    # a division of integers by zero stops the program on a CPU
    "div": (ONE,),
    "floor_divide": (ONE,),
    "remainder": (ONE,),
    "fmod": (ONE,),
}


def value_of(neutral: Neutral, dtype: torch.dtype) -> Any:
    if neutral in (ZERO, ONE):
        return int(neutral is ONE)
    least = neutral is LEAST
    if dtype.is_floating_point:
        return float("-inf") if least else float("inf")
    if dtype == torch.bool:
        return not least
    limits = torch.iinfo(dtype)
    return limits.min if least else limits.max
