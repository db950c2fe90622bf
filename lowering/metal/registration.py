"""Kernels as torch operators: `torch.ops.unified_metal.<name>`, the same for eager and compiled.

Each operator has a launcher (Apple GPUs), a meaning in plain torch (every other device) and a fake
implementation. A launcher's results are believed after they were compared: for every combination of
dtypes and every order of magnitude of the sizes, the first results are held against the meaning on
the CPU. What is off, or does not compile, is computed by plain torch from then on, and the report
says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lowering import observing
from lowering.metal import shaders
from lowering.reasons import Reason

NAMESPACE = "unified_metal"
PROVIDER = "metal"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_FACTOR = 32  # times the dtype's precision, in the relative L2 norm: what is wrong is off by more

Implementation = Callable[..., Any]
_lock = threading.Lock()
_verdicts: dict[Hashable, str] = {}  # empty: right; else why plain torch computes it
_wrong: dict[Hashable, str] = {}  # (operator, dtypes) of which one call was wrong


def operator(
    name: str,
    *,
    region: str,
    launcher: Implementation,
    meaning: Implementation,
    fake: Implementation,
) -> Any:
    """Register one operator; its schema is read from the launcher's annotations.

    What a launcher gives lies in memory as `fake` says; what `meaning` gives is laid out so.
    """
    schema = torch.library.infer_schema(launcher, mutates_args=())

    def compute(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        found = None
        if shaders.launches_on(tensors[0].device) and all(one.numel() for one in tensors):
            found = _believed(name, region, launcher, meaning, args, tensors)
        if found is None:
            return _laid_out(meaning(*args), fake(*args))
        observing.region_ran(region, PROVIDER)
        return found

    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def forget() -> None:
    """Compare every kernel again, as in a new process."""
    with _lock:
        _verdicts.clear()
        _wrong.clear()


# --- is it right? ---------------------------------------------------------------------------------


def _believed(
    name: str,
    region: str,
    launcher: Implementation,
    meaning: Implementation,
    args: Sequence[Any],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """What the kernel computed, or None where plain torch has to."""
    dtypes = (name, *(str(one.dtype) for one in tensors))
    if dtypes in _wrong:
        return None
    sizes = tuple(size.bit_length() for one in tensors for size in one.shape)
    verdict = _verdicts.get((dtypes, sizes))
    if verdict == "":
        return launcher(*args)
    found, verdict = _tried(name, launcher, meaning, args)
    with _lock:
        _verdicts[dtypes, sizes] = verdict
        if verdict:
            _wrong[dtypes] = verdict
    if verdict:
        observing.region_demoted(region, PROVIDER, Reason("refused-at-run", verdict))
        return None
    return found


def _tried(
    name: str, launcher: Implementation, meaning: Implementation, args: Sequence[Any]
) -> tuple[Any, str]:
    try:
        found = launcher(*args)
        on_cpu = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        off = _difference(_as_tuple(found), _as_tuple(meaning(*on_cpu)))
    except Exception as error:  # noqa: BLE001  (a shader that does not compile says so in any way)
        return None, f"the Metal kernel {name} does not run here: {type(error).__name__}: {error}"
    if off:
        return None, f"the Metal kernel {name} was compared with the CPU on its first inputs: {off}"
    return found, ""


def _difference(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    for got, wanted in zip(found, right, strict=True):
        if not wanted.numel():
            continue
        ours, theirs = got.cpu().float(), wanted.float()
        finite = torch.isfinite(theirs)
        if not torch.equal(torch.isfinite(ours), finite):
            return "other numbers are infinite or NaN"
        apart, length = (ours - theirs)[finite], theirs[finite]
        error = float(torch.linalg.vector_norm(apart)) / (
            float(torch.linalg.vector_norm(length)) or 1.0
        )
        if error > _FACTOR * torch.finfo(wanted.dtype).eps:
            return f"it is off by {error:.2g} of their length"
    return ""


# --- results --------------------------------------------------------------------------------------


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _laid_out(found: Any, promised: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return _as_promised(found, promised)
    return tuple(map(_as_promised, found, promised))


def _as_promised(found: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    return found if found.stride() == promised.stride() else promised.copy_(found)
