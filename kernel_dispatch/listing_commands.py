"""`doctor`, `devices`, `levels`, `options`: what is here and what can be set, as text or JSON.

Torch is imported only once a command runs, as in cli.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_dispatch.terminal import Style, style_of, write, write_json

if TYPE_CHECKING:
    from lowering.contract import Probe, Target

Record = dict[str, Any]


def run_doctor(args: argparse.Namespace) -> int:
    from kernel_dispatch import diagnosis, doctor

    rows = diagnosis.diagnose(doctor.collect())
    write(doctor.as_json(rows) if args.json else doctor.render(rows, style_of(sys.stdout)))
    return diagnosis.exit_code(rows)


def run_devices(args: argparse.Namespace) -> int:
    from kernel_dispatch.doctor import probed_targets

    found = probed_targets()
    if args.json:
        write_json([_target_record(target, probe) for target, probe in found])
    else:
        style = style_of(sys.stdout)
        write("\n".join(_target_text(target, probe, style) for target, probe in found))
    return 0


def _target_record(target: Target, found: Probe) -> dict[str, Any]:
    return {
        "name": target.name,
        "summary": target.summary,
        "available": found.available,
        "reason": found.reason,
        "fix": found.fix,
        "version": found.version,
        "details": dict(found.details),
        "priority": target.priority,
        "aliases": list(target.aliases),
        "proven_on": target.proven_on,
    }


def _target_text(target: Target, found: Probe, style: Style) -> str:
    from kernel_dispatch.diagnosis import shown_version

    state = shown_version(found) if found.available else f"absent: {found.reason}"
    lines = [
        f"{style.mark('ok' if found.available else 'info')} {style.bold(target.name)}  {state}"
    ]
    if found.fix:
        lines.append(f"    to get it       {found.fix}")
    lines.append(f"    what            {target.summary}")
    lines.append(f"    aliases         {', '.join(target.aliases) or 'none'}")
    lines.append(f"    priority        {target.priority}")
    lines.append(f"    proven on       {target.proven_on or 'not told'}")
    lines += [
        f"    {key.replace('_', ' '):<15} {_shown_detail(key, value)}"
        for key, value in found.details.items()
    ]
    return "\n".join(lines)


def _shown_detail(key: str, value: Any) -> str:
    from kernel_dispatch.diagnosis import gib

    if key == "memory_bytes" and isinstance(value, int):
        return gib(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown_detail(name, one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        separator = "; " if any(isinstance(one, Mapping) for one in value) else " "
        return separator.join(_shown_detail("", one) for one in value) or "none"
    return str(value)


def run_levels(args: argparse.Namespace) -> int:
    from lowering.levels import CONTRACTS, Level

    records = [
        {
            "level": str(one.level),
            "alias": one.alias,
            "default": one.level == Level.O2,
            "may_do": one.may_do,
            "numerics": one.numerics,
            "compile_time": one.compile_time,
        }
        for one in CONTRACTS
    ]

    def text(one: Record, style: Style) -> list[str]:
        default = "  (default)" if one["default"] else ""
        return [
            f"{style.bold(one['level'])}  {one['alias']}{default}",
            f"    may do        {one['may_do']}",
            f"    numerics      {one['numerics']}",
            f"    compile time  {one['compile_time']}",
        ]

    return _listed(records, text, args)


def run_options(args: argparse.Namespace) -> int:
    from kernel_dispatch.diagnosis import shown_value
    from kernel_dispatch.options import OPTIONS
    from kernel_dispatch.settings import resolve

    defaults = resolve(environ={}).as_dict()
    records = [
        {
            "name": option.name,
            "env": option.env,
            "default": defaults[option.name]["value"],
            "accepted": option.accepted,
            "summary": option.summary,
        }
        for option in OPTIONS
    ]

    def text(one: Record, style: Style) -> list[str]:
        return [
            f"{style.bold(one['name'])}  {one['summary']}",
            f"    accepted     {one['accepted']}",
            f"    default      {shown_value(one['default'])}",
            f"    environment  {one['env'] or 'none'}",
        ]

    return _listed(records, text, args)


def _listed(
    records: Sequence[Record], text: Callable[[Record, Style], list[str]], args: argparse.Namespace
) -> int:
    if args.json:
        write_json(records)
        return 0
    style = style_of(sys.stdout)
    write("\n".join(line for one in records for line in text(one, style)))
    return 0
