"""Which workloads and peers there are by name.

Both live in `benchmarks/` of the project's checkout. An installed package without a checkout runs
the user's own models, against every backend that torch.compile knows.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_dispatch.bench.contender import Contender
from kernel_dispatch.bench.workload import Case, Workload
from kernel_dispatch.user_code import load
from lowering.errors import SettingError, unknown

_CHECKOUT = Path(__file__).resolve().parents[2]


def workloads() -> Mapping[str, Workload]:
    return _of_checkout("benchmarks.workloads", "WORKLOADS", {})


def core() -> tuple[str, ...]:
    return _of_checkout("benchmarks.workloads", "CORE", ())


def peers() -> tuple[Contender, ...]:
    return _of_checkout("benchmarks.peers", "PEERS", ())


def workload(target: str) -> Workload:
    """A workload by its name, or the user's own by `module:function`."""
    known = workloads()
    if target in known:
        return known[target]
    if ":" in target:
        return Workload(target, lambda: Case(*load(target)), "given on the command line")
    if not known:
        raise SettingError(
            f"unknown workload {target!r}: built-in ones come with the project's checkout. "
            "Accepted: module:function, file.py:function."
        )
    raise unknown("workload", target, [*known, "module:function", "file.py:function"])


def _of_checkout(module: str, name: str, otherwise: Any) -> Any:
    if not (_CHECKOUT / module.replace(".", "/") / "__init__.py").is_file():
        return otherwise
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("benchmarks"):  # the user's own `benchmarks` comes first
            return otherwise
        raise
    return getattr(found, name)
