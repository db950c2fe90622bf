"""`profile`: run the user's code under unified and torch's profiler, tell where the time went.

Torch is imported only once the command runs, as in cli.py.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_dispatch import explain_command
from kernel_dispatch.terminal import write, write_json
from kernel_dispatch.user_code import (
    UsageError,
    UserCodeError,
    load,
    print_user_error,
    user_code,
)

if TYPE_CHECKING:
    from kernel_dispatch.profiling import Profile

DESCRIPTION = """Where the time of compiled code goes: to each region and its provider, to kernels
that Inductor generated, and to the operators outside of any region, the longest first. Those are
what a new region or kernel would gain most from.

TARGET is what `explain` takes (see `explain --help`). A function is compiled and called twice
before it is measured; a script is measured as it runs, in its compiled graphs only, first calls
included. Profiling itself takes time: read the shares, not the sum."""
EPILOG = """examples:
  kernel-dispatch profile shop:make
  kernel-dispatch profile shop:make --level O1 --top 20
  kernel-dispatch profile train.py --all --json -- --epochs 1 > profile.json

exit code: 0 fine, 1 no graph reached unified or the code raised, 2 wrong usage."""
_WARM_UP_CALLS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="module:function, file.py:function or script.py"
    )
    parser.add_argument("--level", help="O0, O1, O2 or O3, instead of UNIFIED_LEVEL")
    parser.add_argument("--device", help="force a target, instead of UNIFIED_DEVICE")
    parser.add_argument("--top", metavar="N", default="10", help="rows of each kind; 10")
    parser.add_argument("--calls", metavar="N", default="10", help="calls of a function; 10")
    parser.add_argument(
        "--all", action="store_true", help="in a script: make unified the default backend"
    )


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 if no graph reached unified or the user's code raised."""
    from kernel_dispatch.profiling import kernel_events
    from kernel_dispatch.settings import configure

    top, calls = _number(args.top, "--top"), _number(args.calls, "--calls")
    wishes = explain_command.wishes(args)
    with configure(**wishes, inductor=kernel_events()):
        explain_command.demand_settings()
        # With --json, what the user's code prints must not end up inside of the JSON.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            script = explain_command.script_of(args.target)
            if script is not None:
                found, error = _profile_script(script, args)
            else:
                found, error = _profile_function(args, calls), None
    _tell(found, error, args, top, script is not None)
    if error is not None:
        print_user_error(error)
    return int(error is not None or not found.graphs)


def _tell(
    found: Profile, error: UserCodeError | None, args: argparse.Namespace, top: int, script: bool
) -> None:
    never = "" if found.graphs else _NEVER
    if not found.graphs and script and error is None:
        never = explain_command.NEVER_IN_SCRIPT
    if args.json:
        cause = error.__cause__ if error is not None else None
        raised = f"{type(cause).__name__}: {cause}" if cause is not None else ""
        write_json({"target": args.target, "hint": never, "raised": raised, **found.as_dict(top)})
        return
    if never:
        write(never)
    if found.rows:
        write(found.text(top))


_NEVER = "never-called: no graph reached unified; `explain` tells why. Below, what ran uncompiled:"


def _number(text: str, flag: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= 100_000:
        raise UsageError(f"{flag} {text!r}: give a whole number from 1 to 100000.")
    return number


def _profile_function(args: argparse.Namespace, calls: int) -> Profile:
    from kernel_dispatch.explaining import compiled_afresh, uncompiled, watching
    from kernel_dispatch.profiling import read

    explain_command.demand_function(args)
    fn, fn_args, fn_kwargs = load(args.target)
    with watching() as watched, uncompiled(fn), user_code(f"{args.target} raised"):
        compiled = compiled_afresh(fn)
        for _ in range(_WARM_UP_CALLS):
            compiled(*fn_args, **fn_kwargs)
        with _profiler() as profiler:
            for _ in range(calls):
                compiled(*fn_args, **fn_kwargs)
    return read(profiler.events(), watched.graphs, calls)


def _profile_script(script: Path, args: argparse.Namespace) -> tuple[Profile, UserCodeError | None]:
    from kernel_dispatch.explaining import watching
    from kernel_dispatch.profiling import read

    with watching() as watched, _profiler() as profiler:
        error = explain_command.run_script(script, args)
    return read(profiler.events(), watched.graphs, None, only_compiled=True), error


def _profiler() -> Any:
    import torch

    from kernel_dispatch.profiling import activities

    return torch.profiler.profile(activities=activities())
