"""The capability table: rows of plain data, and the pure `check()` that returns every reason.

Three questions are kept apart: is the provider installed and working (a probe, asked once), does
the row take this work (`check`), and does the user want it (`Situation.disabled`, the level).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowering.levels import Level
from lowering.reasons import Reason

GRAPH = "graph"  # the region name of rows that take whole graphs


@dataclass(frozen=True)
class CapabilityRow:
    """(target, provider, region) and the limits within which it may be used."""

    target: str
    provider: str
    region: str = GRAPH
    level: Level = Level.O0
    priority: int = 0
    dtypes: frozenset[str] | None = None  # None: every dtype
    refused_dtypes: frozenset[str] = frozenset()
    dtype_features: frozenset[tuple[str, str]] = frozenset()  # (dtype, the feature that it needs)
    refused_ops: frozenset[str] = frozenset()
    op_features: frozenset[tuple[str, str, str]] = frozenset()  # (op, feature that it needs, why)
    refused_complex_ops: frozenset[str] = frozenset()  # refused where complex numbers are around
    refused_random_ops: frozenset[str] = frozenset()  # refused where random numbers are drawn
    refused_alone: frozenset[str] = frozenset()  # refused in float32 as a graph's only op
    training: bool = True
    no_training: str = ""  # why it takes inference only, where there is more to say
    dynamic: bool = True
    mutation: bool = True
    subclasses: bool = True
    negated: bool = True  # inputs whose sign is a bit of the tensor, not of the memory
    features: frozenset[str] = frozenset()  # ISA flags or architecture names that must be there
    needs: frozenset[str] = frozenset()  # other providers that have to work for this one to
    min_ops: int = 0  # graphs with fewer ops than this ...
    min_bytes: int = 0  # ... that also move fewer bytes than this are left alone
    min_bytes_training: int | None = None  # the same with gradients, if it is another number
    min_flops: int = 0
    shape_classes: frozenset[str] | None = None  # of a region's shapes; None: all of them
    early: bool = False  # matched in the graph as Dynamo captured it, before autograd
    error: float = 0.0  # the relative error that fewer bits bring, to be within the tolerance
    only_if_measured: bool = False  # taken only where this machine was measured and it came first
    before_measured: bool = False  # what it gains does not show in the rate of single calls
    why: str = ""  # the fact that the limits rest on


@dataclass(frozen=True)
class Work:
    """What a row is asked about: a whole graph, or one region of it."""

    region: str = GRAPH
    dtypes: frozenset[str] = frozenset()
    ops: frozenset[str] = frozenset()
    op_count: int = 0
    bytes_moved: int = 0
    flops: int = 0
    training: bool = False
    dynamic: bool = False
    mutation: bool = False
    random: bool = False
    negated: bool = False
    subclasses: frozenset[str] = frozenset()
    shape_class: str = ""  # of a region: what decides who is fast (one row or many, depthwise ...)


@dataclass(frozen=True)
class Situation:
    """Level, wish and machine, as far as a row may know them."""

    level: Level
    features: frozenset[str] = frozenset()
    # Providers that must not be used; as a mapping, with the words why.
    disabled: frozenset[str] | Mapping[str, str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)  # provider -> why it is not there
    tolerance: float = math.inf


def check(row: CapabilityRow, work: Work, situation: Situation) -> tuple[Reason, ...]:
    """Every reason why this row must not take this work; an empty tuple means yes."""
    reasons: list[Reason] = []
    no = lambda code, text: reasons.append(Reason(code, text))  # noqa: E731
    if situation.level < row.level:
        no("level-too-low", f"{row.provider} may be used from {row.level} on")
    if row.provider in situation.disabled:
        no("provider-disabled", _disabled(row.provider, situation.disabled))
    if row.provider in situation.absent:
        no("provider-absent", f"{row.provider}: {situation.absent[row.provider]}")
    for name in sorted(row.needs & situation.absent.keys()):
        no("provider-absent", f"{row.provider} needs {name}: {situation.absent[name]}")
    if row.error > situation.tolerance:
        text = f"{row.provider} is off by some {row.error:g} here, the tolerance is "
        no("over-tolerance", f"{text}{situation.tolerance:g}")
    if missing := row.features - situation.features:
        no("arch-unsupported", f"needs {_listed(missing)}")
    _check_values(row, work, situation.features, no)
    _check_kind(row, work, no)
    return tuple(reasons)


def _disabled(provider: str, disabled: frozenset[str] | Mapping[str, str]) -> str:
    why = disabled[provider] if isinstance(disabled, Mapping) else "disabled by the user"
    return f"{provider} is {why}"


def _check_values(  # type: ignore[no-untyped-def]
    row: CapabilityRow, work: Work, features: frozenset[str], no
) -> None:
    refused = work.dtypes & row.refused_dtypes
    refused |= {name for name, has in row.dtype_features if has not in features} & work.dtypes
    if row.dtypes is not None:
        refused |= work.dtypes - row.dtypes
    if refused:
        no("dtype-unsupported", f"{row.provider} does not take {_listed(refused)}")
    if ops := work.ops & row.refused_ops:
        no("op-unsupported", f"{row.provider} does not take {_listed(ops)}")
    lacks = [one for one in row.op_features if one[0] in work.ops and one[1] not in features]
    for feature, why in sorted({(feature, why) for _, feature, why in lacks}):
        ops = frozenset(op for op, *rest in lacks if rest == [feature, why])
        no(
            "op-unsupported",
            f"{row.provider} does not take {_listed(ops)} without {feature}: {why}",
        )
    if any(dtype.startswith("complex") for dtype in work.dtypes) and (
        ops := work.ops & row.refused_complex_ops
    ):
        no("op-unsupported", f"{row.provider} does not take {_listed(ops)} of complex numbers")
    if work.random and (ops := work.ops & row.refused_random_ops):
        no("op-unsupported", f"{row.provider} does not take {_listed(ops)} and random numbers")
    in_training = work.training and row.min_bytes_training is not None
    min_bytes = row.min_bytes_training if in_training else row.min_bytes
    # Who draws random numbers must not depend on size or gradients: a checkpoint calls a function
    # without gradients, and again with them, and wants the same numbers.
    little = not work.random and work.op_count < row.min_ops
    if little and work.bytes_moved < (min_bytes or 0):
        no(
            "too-small",
            f"{work.op_count} ops and {work.bytes_moved} bytes; {row.provider} starts to pay at "
            f"{row.min_ops} ops or {min_bytes} bytes",
        )
    if work.op_count == 1 and work.dtypes == {"float32"} and (ops := work.ops & row.refused_alone):
        no("too-small", f"{_listed(ops)} by itself leaves {row.provider} nothing to fuse")
    if row.shape_classes is not None and work.shape_class not in row.shape_classes:
        no("shape-unsupported", f"{row.provider} is not used for {work.shape_class} {work.region}s")
    if work.flops < row.min_flops:
        no("too-small", f"{work.flops} FLOPs; {row.provider} starts to pay at {row.min_flops}")


def _check_kind(row: CapabilityRow, work: Work, no) -> None:  # type: ignore[no-untyped-def]
    if work.training and not row.training:
        more = f": {row.no_training}" if row.no_training else ""
        no("training-unsupported", f"{row.provider} takes inference only{more}")
    if work.dynamic and not row.dynamic:
        no("dynamic-unsupported", f"{row.provider} takes static shapes only")
    if work.mutation and not row.mutation:
        no("mutation-unsupported", f"{row.provider} does not write into graph inputs")
    if work.negated and not row.negated:
        no(
            "op-unsupported",
            f"{row.provider} reads memory, and an input is the negative of its own",
        )
    if work.subclasses and not row.subclasses:
        no("subclass-unsupported", f"{row.provider} does not take {_listed(work.subclasses)}")


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))
