"""`doctor`: what is here, what is missing, and the exact command that fixes it.

Three steps, kept apart so that tests can hand in any machine: `collect()` asks and never raises,
`diagnosis.diagnose()` makes rows of the facts and asks nothing, `render()` makes text of the rows.
"""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import TypeVar

import torch

from kernel_dispatch import __version__, calibration, devices
from kernel_dispatch.diagnosis import (
    DISTRIBUTION,
    Calibration,
    Facts,
    Row,
    Setting,
    Window,
    exit_code,
)
from kernel_dispatch.options import OPTIONS
from kernel_dispatch.settings import Settings, resolve
from kernel_dispatch.terminal import Style
from lowering import libraries, machine, measuring, providers, targets, toolchain, topology
from lowering.contract import Probe, Provider, Target
from lowering.errors import UnifiedError, nearest
from triton_kernels.availability import status as triton_status

T = TypeVar("T")


# --- asking ---------------------------------------------------------------------------------------


def collect(environ: Mapping[str, str] | None = None) -> Facts:
    """Ask this machine. Whatever a probe raises becomes a line of its own."""
    environ = os.environ if environ is None else environ
    failed: dict[str, str] = {}

    def ask(what: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception as error:  # noqa: BLE001  (one broken probe must not hide the others)
            failed[what] = f"{type(error).__name__}: {error}"
            return otherwise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say, a row says
        return Facts(
            python=platform.python_version(),
            torch=str(torch.__version__),
            window=ask("torch window", torch_window, None),
            entry_points=ask("entry point", _entry_points, ()),
            cpu=ask("CPU", machine.cpu, None),
            topology=ask("topology", topology.topology, None),
            threads=ask("threads", torch.get_num_threads, 1),
            thread_advice=ask("thread advice", libraries.thread_advice, ""),
            libraries=ask("libraries", libraries.libraries, ()),
            compiler=ask("C++ compiler", toolchain.probe_deep, None),
            triton=ask("triton", triton_status, None),
            calibration=ask("calibration", lambda: _calibration(environ), None),
            targets=ask("targets", probed_targets, ()),
            providers=ask("providers", _probed_providers, ()),
            broken_targets=ask("target plug-ins", _broken_targets, {}),
            settings=ask("settings", lambda: tuple(_settings(environ)), ()),
            unknown_variables=ask("variables", lambda: _unknown_variables(environ), {}),
            failed=failed,  # filled by the questions above
        )


def torch_window() -> Window | None:
    """(2, 8), (2, 16): from this version on, below that one; None where the metadata has none."""
    for line in metadata.requires(DISTRIBUTION) or []:
        if re.match(r"torch\b(?![-_.])", line) and "extra ==" not in line:
            low, high = (re.search(rf"{sign}(\d+)\.(\d+)", line) for sign in (">=", "<"))
            if low and high:
                return (int(low[1]), int(low[2])), (int(high[1]), int(high[2]))
    return None


def _entry_points() -> tuple[str, ...]:
    found = metadata.entry_points(group="torch_dynamo_backends", name="unified")
    return tuple(
        f"{entry.value} from {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        for entry in found
    )


def probed_targets() -> tuple[tuple[Target, Probe], ...]:
    return tuple((target, _answer(devices.probe(target))) for target in targets.known())


def _probed_providers() -> tuple[tuple[Provider, Probe], ...]:
    known = providers.known()
    return tuple((known[name], _answer(devices.probe_provider(name))) for name in sorted(known))


def _broken_targets() -> dict[str, tuple[str, str]]:
    """Plug-ins that could not be loaded: entry point -> why, and who brought it."""
    owners = {
        entry.name: entry.dist.name
        for entry in metadata.entry_points(group=targets.GROUP)
        if entry.dist is not None
    }
    return {name: (why, owners.get(name, "")) for name, why in targets.broken.items()}


def _answer(found: object) -> Probe:
    """A third party's probe may give back anything."""
    if isinstance(found, Probe):
        return found
    return Probe.no(f"its probe gave {found!r}, not a lowering.contract.Probe")


def _calibration(environ: Mapping[str, str]) -> Calibration:
    """What is stored; nothing is measured. A bad setting has a row of its own."""
    deciding = ("cache_dir", "calibration", "threads")
    names = {option.env for option in OPTIONS if option.name in deciding}
    try:
        settings = resolve(environ={k: v for k, v in environ.items() if k in names})
    except UnifiedError:
        settings = Settings()
    wanted, folder = measuring.conditions(settings.threads), settings.cache_folder
    found = calibration.read(folder, wanted)
    return Calibration(
        profile=found.profile,
        path=str(found.path or ""),
        note=found.note,
        setting=settings.calibration,
        others=tuple(
            " and ".join(one.conditions.differences(wanted))
            for one in calibration.others(folder, wanted)
        ),
    )


def _settings(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Each option on its own, so that one bad value does not hide the next."""
    for option in OPTIONS:
        given = environ.get(option.env, "") if option.env else ""
        alone = {option.env: given} if option.env else {}
        try:
            row = resolve(environ=alone).as_dict()[option.name]
        except UnifiedError as error:
            yield Setting(option.name, option.env, given, option.env or "", str(error))
        else:
            yield Setting(option.name, option.env, row["value"], row["source"])


def _unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = [option.env for option in OPTIONS if option.env]
    unknown = sorted(name for name in environ if name.startswith("UNIFIED_") and name not in known)
    return {name: nearest(name, known) or "" for name in unknown}


# --- telling --------------------------------------------------------------------------------------


def as_json(rows: list[Row]) -> str:
    """For programs: `exit_code`, how often each status, and every row with its details."""
    counts = {status: _count(rows, status) for status in ("ok", "info", "warn", "problem")}
    answer = {
        "version": __version__,
        "exit_code": exit_code(rows),
        "counts": counts,
        "rows": [row.as_dict() for row in rows],
    }
    return json.dumps(answer, indent=2, default=str)


def render(rows: list[Row], style: Style) -> str:
    """For people: a block per section, a line per row, the fix below it."""
    lines: list[str] = []
    wide = max((len(row.name) for row in rows), default=0)
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", style.bold(section)] if lines else [style.bold(section)]
        for row in (row for row in rows if row.section == section):
            lines += _row_lines(row, wide, style)
    return "\n".join([*lines, "", _summary(rows, style)])


def _row_lines(row: Row, wide: int, style: Style) -> list[str]:
    indent = " " * (wide + 6)
    # Compilers answer in several lines; the row keeps its shape.
    text = " ".join(row.text.split())
    if style.width and style.width > len(indent) + 20:
        text = textwrap.fill(
            text,
            style.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,  # paths
            break_on_hyphens=False,  # package names
        ).lstrip()
    lines = [f"  {style.mark(row.status)} {row.name:<{wide}}  {text}"]
    if row.fix:  # never wrapped: it is there to be copied
        label = "fix" if row.status in ("warn", "problem") else "to get it"
        lines.append(f"{indent}{label}: {row.fix}")
    return lines


def _summary(rows: list[Row], style: Style) -> str:
    problems, warned = _count(rows, "problem"), _count(rows, "warn")
    verdict = f"{problems or 'No'} problem{'s' * (problems != 1)}"
    if warned:
        verdict += f", {warned} warning{'s' * (warned != 1)}"
    words = {"ok": "fine", "info": "for information", "warn": "warning", "problem": "problem"}
    legend = "  ".join(f"{style.mark(status)} {word}" for status, word in words.items())
    return f"{style.bold(verdict)}.   {legend}"


def _count(rows: Iterable[Row], status: str) -> int:
    return sum(row.status == status for row in rows)
