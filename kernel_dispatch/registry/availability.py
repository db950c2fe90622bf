"""Is a provider here? Enabled by the configuration file, and its probes say yes; else why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_dispatch.registry.table import TABLE, BackendInfo
from lowering.contract import Target

if TYPE_CHECKING:
    from kernel_dispatch.config.backend_file import BackendFile
    from kernel_dispatch.selection import Machine


def targets_of(info: BackendInfo, machine: Machine, config: BackendFile | None) -> list[Target]:
    """Those of its targets that are here and take graphs, best first."""
    return [t for t in _targets(info, machine) if not _target_reason(t, machine, config)]


def target_of(info: BackendInfo, machine: Machine, config: BackendFile | None) -> Target | None:
    return next(iter(targets_of(info, machine, config)), None)


def reason(info: BackendInfo, machine: Machine, config: BackendFile | None) -> str:
    """Why it cannot be used here; empty if it can. A library is asked where its target is here."""
    if config is not None and not config.enables(info.name):
        return config.why_off(info.name)
    if target_of(info, machine, config) is None:
        whys = [_target_reason(target, machine, config) for target in _targets(info, machine)]
        return "; ".join(dict.fromkeys(whys))
    whys = [machine.absent(name) for name in info.providers]
    return whys[0] if all(whys) and whys else ""  # one of them is enough


def reasons(machine: Machine, config: BackendFile | None) -> dict[str, str]:
    """All fourteen, in the order of the table; an empty reason means that it is available."""
    return {info.name: reason(info, machine, config) for info in TABLE}


def _targets(info: BackendInfo, machine: Machine) -> list[Target]:
    return [t for name in info.targets for t in machine.targets if t.name == name]


def _target_reason(target: Target, machine: Machine, config: BackendFile | None) -> str:
    if config is not None and (why := config.target_off(target.name)):
        return why
    found = machine.probe(target)
    return "" if found.available else found.reason
