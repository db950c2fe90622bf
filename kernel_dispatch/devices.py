"""What is on this machine, asked once and lazily: targets and providers with their reasons."""

from __future__ import annotations

from kernel_dispatch.selection import Machine
from lowering import providers, targets
from lowering.contract import Probe, Target

_answers: dict[str, Probe] = {}  # target name -> what its probe said


def probe(target: Target) -> Probe:
    """A target's probe, asked once per process; a probe that raises is a `no` with its error."""
    if target.name not in _answers:
        try:
            _answers[target.name] = target.probe()
        except Exception as error:  # noqa: BLE001  (third-party probes: one bad one stops nobody)
            _answers[target.name] = Probe.no(f"its probe raised {type(error).__name__}: {error}")
    return _answers[target.name]


def probe_provider(name: str) -> Probe:
    """A provider's probe. Not cached here: providers cache what is costly (see toolchain)."""
    try:
        return providers.get(name).probe()
    except Exception as error:  # noqa: BLE001
        return Probe.no(f"its probe raised {type(error).__name__}: {error}")


def absent(provider: str) -> str:
    """Why a provider does not work here; empty if it does."""
    found = probe_provider(provider)
    return "" if found.available else found.reason


def this_machine() -> Machine:
    return Machine(targets.known(), probe, absent)


def available_targets() -> list[str]:
    """Names of the targets that are here, best first."""
    return [target.name for target in targets.known() if probe(target).available]


def forget() -> None:
    """Ask again next time."""
    _answers.clear()
