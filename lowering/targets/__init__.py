"""Every target that this installation knows: ours by a static list, others by entry point.

A third party adds a target without touching this code: an entry point in the group
`kernel_dispatch.targets` that loads to a `lowering.contract.Target`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from importlib.metadata import entry_points

from lowering.contract import Target
from lowering.errors import RegistrationError, UnifiedWarning

GROUP = "kernel_dispatch.targets"
MODULES = ("cuda", "rocm", "xla", "xpu", "neuron", "mps", "cpu")


def ours() -> tuple[Target, ...]:
    """The targets that come with this package."""
    records = (importlib.import_module(f"lowering.targets.{name}").TARGET for name in MODULES)
    return tuple(records)


@functools.cache
def known() -> tuple[Target, ...]:
    """All targets, highest priority first. Loading a record probes nothing."""
    found = list(ours())
    taken = {name for target in found for name in (target.name, *target.aliases)}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            target = _checked(entry.load(), f"entry point {entry.name!r} ({entry.value})", taken)
        except Exception as error:  # noqa: BLE001  (foreign code: a broken plug-in stops nobody)
            broken[entry.name] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the target plug-in {entry.name!r} ({entry.value}) was left out: "
                f"{broken[entry.name]}",
                UnifiedWarning,
                stacklevel=2,
            )
            continue
        taken |= {target.name, *target.aliases}
        found.append(target)
    return tuple(sorted(found, key=lambda target: (-target.priority, target.name)))


# Plug-ins that could not be loaded, for `doctor`: entry point name -> why.
broken: dict[str, str] = {}


def _checked(record: object, origin: str, taken: set[str]) -> Target:
    if not isinstance(record, Target):
        raise RegistrationError(f"{origin} gives {record!r}, not a lowering.contract.Target")
    if clash := taken & {record.name, *record.aliases}:
        raise RegistrationError(f"{origin} takes the name {sorted(clash)[0]!r}, which is in use")
    return record


def find(name: str) -> Target | None:
    """The target of that exact name, if it is known."""
    return next((target for target in known() if target.name == name), None)


def resolve_name(name: str) -> str | None:
    """A target's name for a name or alias, in any case; None if unknown."""
    name = name.lower()
    if name == "intel":  # a vendor with two kinds of device: the GPU where there is one
        xpu = find("xpu")
        return "xpu" if xpu is not None and xpu.probe().available else "cpu"
    for target in known():
        if name == target.name or name in target.aliases:
            return target.name
    return None


def accepted_names() -> list[str]:
    return sorted({"intel"} | {n for target in known() for n in (target.name, *target.aliases)})
