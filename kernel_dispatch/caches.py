"""Did torch's compile caches help, and if not, why: read off around one compilation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

# counter group, prefix of its counters -> the name in the report
_COUNTERS = {
    ("aot_autograd", "autograd_cache"): "aot_autograd",
    ("inductor", "fxgraph_cache"): "inductor",
}
_LOGGERS = ("torch._functorch._aot_autograd.autograd_cache", "torch._inductor.codecache")


@contextlib.contextmanager
def observed(outcome: dict[str, Any]) -> Iterator[None]:
    """Fill `outcome` with hit, miss or bypass per cache, and the cause of each bypass.

    Torch counts outcomes but only logs why it bypassed, at INFO. The two loggers are listened to
    for the length of the block; what they print is as the user configured it.
    """
    from torch._dynamo.utils import counters

    def read() -> dict[tuple[str, str], int]:
        return {
            (name, result): counters[group][f"{prefix}_{result}"]
            for (group, prefix), name in _COUNTERS.items()
            for result in ("hit", "miss", "bypass")
        }

    before, causes = read(), list[str]()
    with contextlib.ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(_listening(logging.getLogger(name), causes))
        yield
    for (name, result), count in read().items():
        if count > before[name, result]:
            outcome[name] = result if name not in outcome else f"{outcome[name]}+{result}"
    if causes:
        outcome["bypass_causes"] = sorted(set(causes))


@contextlib.contextmanager
def _listening(logger: logging.Logger, causes: list[str]) -> Iterator[None]:
    printed_from = logger.getEffectiveLevel()
    level = logger.level

    def hear(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Bypassing"):
            causes.append(record.getMessage())
        return record.levelno >= printed_from

    logger.addFilter(hear)
    logger.setLevel(min(printed_from, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(hear)
