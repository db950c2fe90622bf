"""What is on this machine, asked once and lazily: targets and providers with their reasons."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kernel_dispatch import settings
from kernel_dispatch.selection import Machine
from lowering import providers, targets
from lowering.contract import Probe, Target
from lowering.native import library

_answers: dict[str, Probe] = {}  # target name -> what its probe said
# Threads that ask at once wait for the first answer: some start a compiler to find it.
_asking = threading.RLock()


def _renew_lock() -> None:
    """A child forked while another thread asks would wait for that thread for ever."""
    global _asking
    _asking = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def probe(target: Target) -> Probe:
    """A target's probe, asked once per process; a probe that raises is a `no` with its error."""
    with _asking:
        if target.name not in _answers:
            _answers[target.name] = _asked(target.probe)
        return _answers[target.name]


def probe_provider(name: str) -> Probe:
    """A provider's probe. Not cached here: providers cache what is costly (see toolchain)."""
    with _asking:
        return _asked(lambda: _probe_in_place(name))


def _probe_in_place(name: str) -> Probe:
    """Kernels are looked for where graphs would have them, whoever asks first."""
    if not library.has_place():
        library.keep_in(settings.resolve().cache_folder)
    return providers.get(name).probe()


def _asked(ask: Callable[[], Probe]) -> Probe:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  (third-party probes: one bad one stops nobody)
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
    with _asking:
        _answers.clear()
