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
    """Why it cannot be used here, all of it; empty if it can."""
    if config is not None and not config.enables(info.name):
        return config.why_off(info.name)
    found = []
    if target_of(info, machine, config) is None:
        found = [_target_reason(target, machine, config) for target in _targets(info, machine)]
    whys = [machine.absent(name) for name in info.providers]
    if whys and all(whys):  # one of them is enough
        found.append(whys[0])
    return "; ".join(dict.fromkeys(found))


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
