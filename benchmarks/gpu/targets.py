"""What would be good enough, put beside what was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.case import FORWARD, Case, Shape, Work
from benchmarks.gpu.rivals import EAGER, OURS
from benchmarks.gpu.timing import Rates

Contenders = dict[str, dict[str, Any]]


def shares(work: Work, microseconds: float, rates: Rates) -> dict[str, float]:
    """Of the rates that this card was measured to reach."""
    seconds = microseconds / 1e6
    found = {"copy_share": work.bytes / seconds / rates.copy}
    if work.flops:
        found["product_share"] = work.flops / seconds / rates.product
    return found


def met(
    case: Case, shape: Shape, direction: str, work: Work, contenders: Contenders
) -> list[dict[str, Any]]:
    """Each target that applies: what was wanted, what was found, and whether that is enough."""
    ours = contenders.get(OURS, {})
    if "device_us" not in ours:
        return []
    wanted = case.targets
    found = []
    share = wanted.copy_share if direction == FORWARD else wanted.backward_copy_share
    if share is not None and work.bytes >= wanted.least_bytes:
        found.append(_at_least("share of the copy rate", ours["copy_share"], share))
    rival = contenders.get(wanted.rival or "", {})
    if "device_us" in rival:
        ratio = ours["device_us"] / rival["device_us"]
        found.append(_at_most(f"times {wanted.rival}", ratio, wanted.times_rival))
    if shape == wanted.at:
        found += _of_one_shape(case, ours, contenders.get(EAGER, {}))
    return found


def _of_one_shape(case: Case, ours: dict[str, Any], eager: dict[str, Any]) -> list[dict[str, Any]]:
    wanted, found = case.targets, []
    if wanted.milliseconds is not None:
        found.append(_at_most("milliseconds", ours["device_us"] / 1e3, wanted.milliseconds))
    peaks = ours.get("peak_bytes"), eager.get("peak_bytes")
    if wanted.share_of_eagers_memory is not None and peaks[0] and peaks[1]:
        share = peaks[0] / peaks[1]
        found.append(_at_most("share of eager's memory", share, wanted.share_of_eagers_memory))
    return found


def _at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_least": limit, "met": value >= limit}


def _at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit}
