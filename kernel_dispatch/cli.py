"""The command line: `kernel-dispatch`, or `python -m kernel_dispatch`.

Results go to stdout, errors to stderr. Exit code 0: fine, 1: problems found, 2: wrong usage.
Torch is imported by the commands that need it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_dispatch import (
    __version__,
    calibrate_command,
    dry_run_command,
    explain_command,
    launch_command,
    profile_command,
)
from kernel_dispatch.bench import command as bench
from kernel_dispatch.terminal import Style, style_of, write, write_json
from kernel_dispatch.user_code import UserCodeError, print_user_error
from lowering.errors import StrictModeError, UnifiedError

if TYPE_CHECKING:
    from lowering.contract import Probe, Target

OK, PROBLEMS, USAGE = 0, 1, 2
INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is the script's own, whatever it looks like.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    if arguments[:1] == ["launch"]:  # all that follows the script is its own already
        split = len(arguments)
    if arguments[:1] == ["bench"] and arguments[1:2] in (["compare"], ["show"]):
        # Argparse takes one word for a command.
        arguments[:2], split = [" ".join(arguments[:2])], split - 1
    parser = _parser()
    try:
        args = parser.parse_args(arguments[:split])
    except SystemExit as leaving:  # argparse has printed help or its error
        return leaving.code if isinstance(leaving.code, int) else OK
    args.script_args = arguments[split + 1 :]
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if args.needs_torch:
            _import_torch()
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except UserCodeError as error:
        print_user_error(error)
        return PROBLEMS
    except UnifiedError as error:
        write(f"kernel-dispatch: {error}", sys.stderr)
        return PROBLEMS if isinstance(error, StrictModeError) else USAGE
    except KeyboardInterrupt:
        write("kernel-dispatch: interrupted", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `kernel-dispatch doctor | head`: nobody reads on, which is fine
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _import_torch() -> None:
    try:
        import torch  # noqa: F401
    except Exception as error:
        # A damaged wheel raises OSError for a library, a missing one ImportError.
        raise UserCodeError('torch does not import; to repair it: pip install "torch>=2.8"') from (
            error
        )


# --- the parser -----------------------------------------------------------------------------------

_EXAMPLES = """examples:
  kernel-dispatch doctor                      what is here, what is missing, how to fix it
  kernel-dispatch doctor --json | jq '.rows[] | select(.status == "problem")'
  kernel-dispatch devices                     every target: present, or absent and why
  kernel-dispatch explain shop:make    compile it with `unified` and tell what happened
  kernel-dispatch explain train.py -- --epochs 1
  kernel-dispatch profile shop:make    where its time goes, by region and operator
  kernel-dispatch calibrate                   measure this machine, once
  kernel-dispatch launch serve.py             run a script bound to cores of one NUMA node
  kernel-dispatch bench shop:make      time it under eager, Inductor and `unified`

exit code: 0 fine, 1 problems found, 2 wrong usage or a bad setting.
Colour is for terminals only: NO_COLOR switches it off and wins over FORCE_COLOR."""

_EXPLAIN = """TARGET is one of

  module:function      a module, with the current folder on the import path
  file.py:function     the same, by path
  script.py            a script, run as __main__; its arguments come after `--`

What `function` may be:

  (a) a function without arguments that returns (model_or_function, args)
      or (model_or_function, args, kwargs); it is called once to build them
  (b) a function without arguments that does the work itself; it is called once
      uncompiled, since only the call tells (a) from (b), and once compiled
  (c) a module or a function with arguments (or a class or factory of a module), next to
      `example_inputs` in the same Python module: a tuple of arguments, a dict of keyword
      arguments, one tensor, or a function that returns one of these

A script runs as written: what it compiles with backend="unified" is reported, other
backends stay as they are. With --all, torch.compile calls that name no backend use
unified too. --level and --device are defaults: the script's own options= win."""

_EXPLAIN_EXAMPLES = """examples:
  kernel-dispatch explain shop:make --level O1
  kernel-dispatch explain bench/net.py:forward --device cpu --verbose
  kernel-dispatch explain train.py --all --json -- --epochs 1 > report.json
  kernel-dispatch explain shop:make --device cuda:sm90 --emit kernels

exit code: 0 fine, 1 no graph reached unified or the code raised, 2 wrong usage."""


_WITHOUT_TORCH = ("levels", "bench show", "bench compare")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kernel-dispatch",
        description='torch.compile(model, backend="unified"): this machine, the settings, and what '
        "was done.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, **more: Any) -> Any:
        made = commands.add_parser(
            name, help=text, description=more.pop("description", text), formatter_class=raw, **more
        )
        if "bench" not in name:  # there --json names a file
            made.add_argument("--json", action="store_true", help="for programs")
        made.set_defaults(command=run, needs_torch=name not in _WITHOUT_TORCH)
        return made

    command("doctor", _doctor, "what is here, what is missing, and the command that fixes it")
    command("devices", _devices, "every target: present, or absent and why")
    explain = command(
        "explain",
        explain_command.run,
        "compile and run a function or a script, and tell what unified did",
        description=_EXPLAIN,
        epilog=_EXPLAIN_EXAMPLES,
    )
    _add_explain_arguments(explain)
    profile_command.add_arguments(
        command(
            "profile",
            profile_command.run,
            "where the time of compiled code goes, and what no region takes yet",
            description=profile_command.DESCRIPTION,
            epilog=profile_command.EPILOG,
        )
    )
    dry_run_command.add_arguments(
        command(
            "dry_run",
            dry_run_command.run,
            "the plan for a device that need not be here",
            description=dry_run_command.DESCRIPTION,
            epilog=dry_run_command.EPILOG,
        )
    )
    bench.add_arguments(
        command(
            "bench",
            bench.run,
            "time a workload under several backends, verified, side by side",
            description=bench.DESCRIPTION,
            epilog=bench.EPILOG,
        )
    )
    bench.add_show_arguments(
        command("bench show", bench.run_show, "a result of bench as text, page, plots or CSV")
    )
    bench.add_compare_arguments(
        command(
            "bench compare",
            bench.run_compare,
            "what became slower between two results of bench",
            epilog=bench.COMPARE_EPILOG,
        )
    )
    calibrate_command.add_arguments(
        command(
            "calibrate",
            calibrate_command.run,
            "measure this machine, so that the fastest library is taken",
            description=calibrate_command.DESCRIPTION,
        )
    )
    launch_command.add_arguments(
        command(
            "launch",
            launch_command.run,
            "run a script bound to physical cores of one NUMA node",
            description=launch_command.DESCRIPTION,
            epilog=launch_command.EPILOG,
        )
    )
    command("levels", _levels, "what O0 to O3 may do and what they promise")
    command("options", _options, "every option, its environment variable and its default")
    return parser


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="module:function, file.py:function or script.py"
    )
    parser.add_argument("--level", help="O0, O1, O2 or O3, instead of UNIFIED_LEVEL")
    parser.add_argument(
        "--device",
        help="force a target (cpu, cuda:1), instead of UNIFIED_DEVICE; one that is not here (mps, "
        "xpu:client, cuda:sm90) is planned for, without running there",
    )
    parser.add_argument(
        "--emit",
        metavar="DIR",
        help="with such an architecture: write the kernels' PTX or assembly",
    )
    parser.add_argument(
        "--all", action="store_true", help="in a script: make unified the default backend"
    )
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="also what was rejected, and why"
    )


# --- doctor, devices, levels, options -------------------------------------------------------------


def _doctor(args: argparse.Namespace) -> int:
    from kernel_dispatch import diagnosis, doctor

    rows = diagnosis.diagnose(doctor.collect())
    write(doctor.as_json(rows) if args.json else doctor.render(rows, style_of(sys.stdout)))
    return diagnosis.exit_code(rows)


def _devices(args: argparse.Namespace) -> int:
    from kernel_dispatch.doctor import probed_targets

    found = probed_targets()
    if args.json:
        write_json([_target_record(target, probe) for target, probe in found])
    else:
        style = style_of(sys.stdout)
        write("\n".join(_target_text(target, probe, style) for target, probe in found))
    return OK


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


def _levels(args: argparse.Namespace) -> int:
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
    if args.json:
        write_json(records)
        return OK
    style = style_of(sys.stdout)
    for one in records:
        default = "  (default)" if one["default"] else ""
        write(f"{style.bold(str(one['level']))}  {one['alias']}{default}")
        write(f"    may do        {one['may_do']}")
        write(f"    numerics      {one['numerics']}")
        write(f"    compile time  {one['compile_time']}")
    return OK


def _options(args: argparse.Namespace) -> int:
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
    if args.json:
        write_json(records)
        return OK
    style = style_of(sys.stdout)
    for one in records:
        write(f"{style.bold(str(one['name']))}  {one['summary']}")
        write(f"    accepted     {one['accepted']}")
        write(f"    default      {shown_value(one['default'])}")
        write(f"    environment  {one['env'] or 'none'}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
