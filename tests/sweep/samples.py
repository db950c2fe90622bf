"""What the sweep runs: ops and dtypes of torch's OpInfo database, and their sample inputs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations, common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
BACKWARD_DTYPES = ("float32", "complex64")
DIRECTIONS = ("forward", "backward")
LEVELS = ("O0", "O1", "O2")

# OpInfo wraps its random ops in a function that seeds; a graph breaks there and the op itself would
# never reach the backend. The sweep seeds by itself, outside of what is compiled.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

# Before every op it looks through the whole stack for a test of unittest, which is never there, and
# pytest's stack is deep: that took longer than all that is done with the samples.
_modules: tuple[Any, ...] = (common_utils, core)
for _module in _modules:
    if hasattr(_module, "extract_test_fn"):
        _module.extract_test_fn = lambda: None

# Values are whatever the memory held: only the form of the result can be compared.
UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
# The first samples of an op that are looked at for one with a non-empty tensor.
_LOOK_AT = 12


@dataclass(frozen=True, order=True)
class Case:
    """One op (with its variant) in one dtype; each case runs in every direction and level."""

    op: str
    variant: str
    dtype: str

    def __str__(self) -> str:
        return f"{op_key(self.op, self.variant)}[{self.dtype}]"


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, and what OpInfo applies to the outputs before a backward."""

    arguments: tuple[tuple, dict]
    process_outputs: Any


def op_key(name: str, variant: str) -> str:
    return f"{name}.{variant}" if variant else name


@cache
def ops() -> dict[tuple[str, str], Any]:
    return {(op.name, op.variant_test_name): op for op in op_db}


def cases(dtypes: tuple[str, ...] = tuple(DTYPES), pattern: str = "") -> list[Case]:
    """Every supported case, in the order of the database; `pattern` is searched in the op's key."""
    return [
        Case(name, variant, dtype)
        for (name, variant), op in ops().items()
        if re.search(pattern, op_key(name, variant))
        for dtype in dtypes
        if DTYPES[dtype] in op.supported_dtypes("cpu")
    ]


def has_direction(case: Case, direction: str) -> bool:
    if direction == "forward":
        return True
    op = ops()[case.op, case.variant]
    return (
        case.dtype in BACKWARD_DTYPES
        and op.supports_autograd
        and DTYPES[case.dtype] in op.supported_backward_dtypes("cpu")
    )


def samples(case: Case, *, requires_grad: bool, limit: int) -> list[Sample]:
    """The first `limit` sample inputs, those with a tensor of several elements before the rest."""
    op = ops()[case.op, case.variant]
    torch.manual_seed(seed_of(case))
    inputs = op.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=requires_grad)
    found = [
        Sample(((sample.input, *sample.args), sample.kwargs), sample.output_process_fn_grad)
        for sample in itertools.islice(_tolerant(inputs), max(limit, _LOOK_AT))
    ]
    found.sort(key=lambda sample: -min(_elements(sample), 2))  # stable: the database's order stays
    return found[:limit]


def seed_of(case: Case) -> int:
    return int.from_bytes(hashlib.sha256(str(case).encode()).digest()[:4], "big")


def _elements(sample: Sample) -> int:
    leaves = pytree.tree_leaves(sample.arguments)
    return max((leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)


def _tolerant(inputs: Any) -> Iterator[Any]:
    """Sample generators of some ops raise after a few samples on builds that lack a library."""
    iterator = iter(inputs)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except (RuntimeError, ValueError, ModuleNotFoundError):
            return
