"""`dry_run`, and `explain --device` with one that is not here: the plan for that device, and for a
GPU its kernels' code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from kernel_dispatch.terminal import write, write_json
from kernel_dispatch.user_code import UsageError, load, user_code

DESCRIPTION = """The plan for a device that need not be here: target, provider, every region with
its provider and the reason; for GPUs by architecture the kernels and what the compiler says of
them. The function is called once, where its tensors are; nothing runs on the device.

TARGET is a function as `explain` takes it (see `explain --help`)."""
EPILOG = """examples:
  kernel-dispatch dry_run shop:make --device mps --verbose
  kernel-dispatch dry_run shop:make --device xpu:client
  kernel-dispatch dry_run shop:make --device cuda:sm90 --emit kernels

exit code: 0 fine, 1 no graph was captured or one was not lowered, 2 wrong usage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="module:function or file.py:function")
    parser.add_argument(
        "--device",
        required=True,
        help="cuda:sm90, rocm:gfx942, mps, xpu, xla, neuron, cpu; an unknown one lists all",
    )
    parser.add_argument("--level", help="O0, O1, O2 or O3")
    parser.add_argument(
        "--emit",
        metavar="DIR",
        help="with an architecture: write the kernels' PTX or assembly",
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="also what was rejected")
    parser.set_defaults(all=False, script_args=[])


def wanted(args: argparse.Namespace) -> bool:
    """Does explain's --device name one that is not on this machine, for a function?"""
    asked = args.device is not None and _is_elsewhere(args.device, args.target)
    if args.emit and not asked:
        raise UsageError(_NO_ARCHITECTURE)
    return asked


_NO_ARCHITECTURE = "--emit writes the code for an architecture: name it, as in --device cuda:sm90."


def _is_elsewhere(device: str, target: str) -> bool:
    from kernel_dispatch.imagined_devices import is_elsewhere, is_imagined

    # A script runs as it is: a device that it forces has to be here.
    return is_imagined(device) or (not target.endswith(".py") and is_elsewhere(device))


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 if no graph was captured or one could not be lowered."""
    from kernel_dispatch.dry_running import dry_run
    from kernel_dispatch.imagined_devices import parse_device

    imagined = parse_device(args.device)  # a typo is told before any code of the user runs
    for given, flag in ((args.script_args, "arguments after -- are"), (args.all, "--all is")):
        if given:
            raise UsageError(f"{flag} for scripts, and a dry run takes a function.")
    if args.target.endswith(".py"):
        raise UsageError(f"a dry run takes a function: write {args.target}:function.")
    if args.emit:
        if imagined.architecture is None:
            raise UsageError(_NO_ARCHITECTURE)
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
