"""`explain --device cuda:sm90`: the plan for a GPU that is not here, and its kernels' code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from kernel_dispatch.terminal import write, write_json
from kernel_dispatch.user_code import UsageError, load, user_code


def wanted(args: argparse.Namespace) -> bool:
    """Does --device name an architecture, and not a device of this machine?"""
    if args.device is None:
        asked = False
    else:
        from kernel_dispatch.dry_running import is_architecture

        asked = is_architecture(args.device)
    if args.emit and not asked:
        raise UsageError(
            "--emit writes the code for an architecture: name it, as in --device cuda:sm90."
        )
    return asked


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 if no graph was captured or one could not be lowered."""
    from kernel_dispatch.dry_running import dry_run, parse_device

    parse_device(args.device)  # a typo is told before any code of the user runs
    for given, flag in ((args.script_args, "arguments after -- are"), (args.all, "--all is")):
        if given:
            raise UsageError(f"{flag} for scripts, and a dry run takes a function.")
    if args.target.endswith(".py"):
        raise UsageError(f"a dry run takes a function: write {args.target}:function.")
    if args.emit:
        _demand_folder(args.emit)
    options = {} if args.level is None else {"level": args.level}
    aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    with aside:
        fn, fn_args, fn_kwargs = load(args.target)
        with user_code(f"{args.target} raised"):
            told = dry_run(fn, fn_args, fn_kwargs, device=args.device, options=options)
    written = told.emit(args.emit) if args.emit else []
    if args.json:
        write_json({**told.as_dict(), "written": [str(path) for path in written]})
    else:
        write(told.text(args.verbose))
        if args.emit:
            write(f"{len(written)} files written to {args.emit}")
    return int(not told.complete)


def _demand_folder(name: str) -> None:
    """Before the work, not after it."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--emit {name}: {error.strerror or error}; give a folder.") from None
