"""What this machine was measured to do: rates per provider, bandwidth, overhead. Plain data.

Nothing here times anything (`measuring` does) or knows where profiles are kept. A machine that
was not measured is ranked by `lowering.prior`, through the same two questions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

SCHEMA = 1  # goes up when a field changes its meaning: older files are then measured again
EAGER = "eager"
GEMM_SHAPES = ("vector", "small", "large")
CONV_SHAPES = ("pointwise", "spatial", "depthwise")
SHAPES: Mapping[str, tuple[str, ...]] = {"gemm": GEMM_SHAPES, "conv": CONV_SHAPES}
MOST_BUSY = 0.2  # an idle machine shows 0.02, one other process on one of two cores 0.6
_SMALL_ROWS = 32  # between the 8 rows and the 128 rows that are measured


class RateKey(NamedTuple):
    """What a rate is about."""

    kind: str  # gemm, conv
    provider: str
    dtype: str  # as torch prints it, without "torch."
    shape: str  # one of SHAPES[kind]


def gemm_shape(rows: int) -> str:
    """The shape class of a product whose left operand has this many rows."""
    if rows <= 1:
        return "vector"
    return "small" if rows <= _SMALL_ROWS else "large"


def conv_shape(kernel: Iterable[int], groups: int, channels: int) -> str:
    """The shape class of a convolution with so many input channels."""
    if groups > 1 and groups == channels:
        return "depthwise"
    return "pointwise" if all(size == 1 for size in kernel) else "spatial"


class Ranking(Protocol):
    """What a measured profile and a prior both answer."""

    def faster(self, kind: str, dtype: str, shape: str) -> list[str]:
        """Providers, fastest first; empty where nothing is known."""

    def speedup(self, key: RateKey, over: str = EAGER) -> float | None:
        """How many times as fast as another provider; None where either is unknown."""


@dataclass(frozen=True)
class Conditions:
    """What a measurement holds for. Another CPU, torch, thread count or kernel: another profile."""

    cpu: str
    vendor: str
    isa: tuple[str, ...]
    cores: int  # effective ones: by affinity and cgroup quota
    threads: int
    torch: str
    candidates: str = ""  # a digest of what was there to be measured

    def fingerprint(self) -> str:
        text = json.dumps([SCHEMA, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: Conditions) -> list[str]:
        """Where these conditions are not the other's, in words."""
        return [
            words
            for name, words in {
                "cpu": f"on {self.cpu}",
                "isa": "with another instruction set",
                "cores": f"on {self.cores} cores",
                "threads": f"with {self.threads} threads",
                "torch": f"with torch {self.torch}",
                "candidates": "with other kernels",
            }.items()
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class MachineProfile:
    """Rates in GFLOP/s, medians; bandwidths in GB/s, best of several. 0 means not measured."""

    conditions: Conditions
    rates: Mapping[RateKey, float]
    read_gbs: float = 0.0
    copy_gbs: float = 0.0  # bytes read plus bytes written
    call_us: float = 0.0  # one call of one op on one element, from Python
    busy: float = 0.0  # the share of time that other processes took meanwhile
    seconds: float = 0.0  # what measuring took
    date: str = ""
    notes: tuple[str, ...] = field(default=())  # what was left out, and why

    @property
    def disturbed(self) -> bool:
        """Were others so busy that the numbers say little?"""
        return self.busy > MOST_BUSY

    def faster(self, kind: str, dtype: str, shape: str) -> list[str]:
        found = {
            key.provider: rate
            for key, rate in self.rates.items()
            if (key.kind, key.dtype, key.shape) == (kind, dtype, shape)
        }
        return sorted(found, key=lambda provider: (-found[provider], provider))

    def speedup(self, key: RateKey, over: str = EAGER) -> float | None:
        rate, other = self.rates.get(key), self.rates.get(key._replace(provider=over))
        return rate / other if rate and other else None

    def as_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        conditions = {**dataclasses.asdict(self.conditions), "isa": list(self.conditions.isa)}
        return {
            "schema": SCHEMA,
            **plain,
            "conditions": conditions,
            "rates": [{**k._asdict(), "gflops": rate} for k, rate in sorted(self.rates.items())],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> MachineProfile:
        """Raises ValueError, KeyError or TypeError for what `as_dict` did not make."""
        if record["schema"] != SCHEMA:
            raise ValueError(f"its schema is {record['schema']!r}, not {SCHEMA}")
        told = record["conditions"]
        texts = {name: _text(told[name]) for name in ("cpu", "vendor", "torch", "candidates")}
        return cls(
            conditions=Conditions(
                isa=tuple(map(_text, told["isa"])),
                cores=_count(told["cores"]),
                threads=_count(told["threads"]),
                **texts,
            ),
            rates={
                RateKey(*(_text(one[name]) for name in RateKey._fields)): _rate(one["gflops"])
                for one in record["rates"]
            },
            **{name: _number(record[name]) for name in _NUMBERS},
            date=_text(record["date"]),
            notes=tuple(map(_text, record["notes"])),
        )


_NUMBERS = ("read_gbs", "copy_gbs", "call_us", "busy", "seconds")


def from_text(text: str) -> tuple[MachineProfile | None, str]:
    """The profile in a file's text, or None and why it is not used. Never raises."""
    try:
        return MachineProfile.from_dict(json.loads(text)), ""
    except KeyError as error:
        return None, f"it is no machine profile: {error} is missing"
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return None, f"it is no machine profile: {error}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a number from 1 on")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a measured number")
    return float(value)


def _rate(value: Any) -> float:
    if not (rate := _number(value)):
        raise ValueError("a rate of 0")
    return rate
