"""The command line: `kernel-dispatch`, or `python -m kernel_dispatch`.

Results go to stdout, errors to stderr. Exit code 0: fine, 1: problems found, 2: wrong usage.
Torch is imported by the commands that need it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_dispatch import (
    __version__,
    calibrate_command,
    dry_run_command,
    explain_command,
    launch_command,
    listing_commands,
    profile_command,
)
from kernel_dispatch.bench import command as bench
from kernel_dispatch.exit_codes import INTERRUPTED, OK, PROBLEMS, USAGE
from kernel_dispatch.terminal import write
from kernel_dispatch.user_code import UserCodeError, print_user_error
from lowering.errors import StrictModeError, UnifiedError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is the script's own, whatever it looks like.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    if arguments[:1] == ["launch"]:  # all that follows the script is its own already
        split = len(arguments)
    if arguments[:1] == ["bench"] and arguments[1:2] in (["compare"], ["show"]):
        # Argparse takes one word for a command.
        arguments[:2], split = [" ".join(arguments[:2])], split - 1
    try:
        args = parser().parse_args(arguments[:split])
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


@dataclass(frozen=True)
class _Command:
    name: str
    run: Callable[[argparse.Namespace], int]
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    description: str = ""
    epilog: str = ""
    needs_torch: bool = True

    def add(self, commands: Any) -> None:
        parser = commands.add_parser(
            self.name,
            help=self.help,
            description=self.description or self.help,
            epilog=self.epilog or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if not self.name.startswith("bench"):  # there --json names a file
            parser.add_argument("--json", action="store_true", help="for programs")
        parser.set_defaults(command=self.run, needs_torch=self.needs_torch)
        if self.add_arguments is not None:
            self.add_arguments(parser)


_COMMANDS = (
    _Command(
        "doctor",
        listing_commands.run_doctor,
        "what is here, what is missing, and the command that fixes it",
    ),
    _Command("devices", listing_commands.run_devices, "every target: present, or absent and why"),
    _Command(
        "explain",
        explain_command.run,
        "compile and run a function or a script, and tell what unified did",
        explain_command.add_arguments,
        explain_command.DESCRIPTION,
        explain_command.EPILOG,
    ),
    _Command(
        "profile",
        profile_command.run,
        "where the time of compiled code goes, and what no region takes yet",
        profile_command.add_arguments,
        profile_command.DESCRIPTION,
        profile_command.EPILOG,
    ),
    _Command(
        "dry_run",
        dry_run_command.run,
        "the plan for a device that need not be here",
        dry_run_command.add_arguments,
        dry_run_command.DESCRIPTION,
        dry_run_command.EPILOG,
    ),
    _Command(
        "bench",
        bench.run,
        "time a workload under several backends, verified, side by side",
        bench.add_arguments,
        bench.DESCRIPTION,
        bench.EPILOG,
    ),
    _Command(
        "bench show",
        bench.run_show,
        "a result of bench as text, page, plots or CSV",
        bench.add_show_arguments,
        needs_torch=False,
    ),
    _Command(
        "bench compare",
        bench.run_compare,
        "what became slower between two results of bench",
        bench.add_compare_arguments,
        epilog=bench.COMPARE_EPILOG,
        needs_torch=False,
    ),
    _Command(
        "calibrate",
        calibrate_command.run,
        "measure this machine, so that the fastest library is taken",
        calibrate_command.add_arguments,
        calibrate_command.DESCRIPTION,
    ),
    _Command(
        "launch",
        launch_command.run,
        "run a script bound to physical cores of one NUMA node",
        launch_command.add_arguments,
        launch_command.DESCRIPTION,
        launch_command.EPILOG,
    ),
    _Command(
        "levels",
        listing_commands.run_levels,
        "what O0 to O3 may do and what they promise",
        needs_torch=False,
    ),
    _Command(
        "options",
        listing_commands.run_options,
        "every option, its environment variable and its default",
    ),
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kernel-dispatch",
        description='torch.compile(model, backend="unified"): this machine, the settings, and what '
        "was done.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=__version__)
    commands = made.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        command.add(commands)
    return made


if __name__ == "__main__":
    sys.exit(main())
