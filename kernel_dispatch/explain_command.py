"""`explain`: compile and run the user's code, tell what unified did.

Torch is imported only once the command runs, as in cli.py.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_dispatch import dry_run_command
from kernel_dispatch.terminal import write, write_json
from kernel_dispatch.user_code import (
    UsageError,
    UserCodeError,
    load,
    near_file,
    print_user_error,
    user_code,
)

if TYPE_CHECKING:
    from kernel_dispatch.explaining import Explanation


DESCRIPTION = """TARGET is one of

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

EPILOG = """examples:
  kernel-dispatch explain shop:make --level O1
  kernel-dispatch explain bench/net.py:forward --device cpu --verbose
  kernel-dispatch explain train.py --all --json -- --epochs 1 > report.json
  kernel-dispatch explain shop:make --device cuda:sm90 --emit kernels

exit code: 0 fine, 1 no graph reached unified or the code raised, 2 wrong usage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 if no graph reached unified or the user's code raised."""
    from kernel_dispatch.settings import configure

    if dry_run_command.wanted(args):
        return dry_run_command.run(args)
    with configure(**wishes(args)):
        demand_settings()
        # With --json, what the user's code prints must not end up inside of the JSON.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            script = script_of(args.target)
            if script is not None:
                told, error = _explain_script(script, args)
            else:
                told, error = _explain_function(args), None
        _tell(told, error, args, script is not None)
    if error is not None:
        print_user_error(error)
    return int(error is not None or not told.called)


def wishes(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are options, read here, so that an error names the flag as its source."""
    from kernel_dispatch.options import OPTIONS

    given = {option: getattr(args, option.name, None) for option in OPTIONS}
    return {o.name: o.parse(v, f"--{o.name}") for o, v in given.items() if v is not None}


def demand_settings() -> None:
    """Bad settings, and a forced device that is absent, are told before any code of the user."""
    from kernel_dispatch.diagnosis import refused_device
    from kernel_dispatch.doctor import probed_targets
    from kernel_dispatch.settings import resolve

    settings = resolve()
    if settings.device is not None:
        source = dict(settings.sources)["device"]
        source = "--device" if source == "configure()" else source
        fix, refused = refused_device(str(settings.device), source, probed_targets())
        if refused:
            raise UsageError(f"{refused} {fix}".strip() + _plan_instead(settings.device.target))


def _plan_instead(target: str) -> str:
    from kernel_dispatch.imagined_devices import names

    named = [name for name in names() if name.startswith(f"{target}:")]
    return f" (A plan without it: dry_run --device {named[0]}.)" if named else ""


def _tell(
    told: Explanation, error: UserCodeError | None, args: argparse.Namespace, script: bool
) -> None:
    hint = NEVER_IN_SCRIPT if script and not told.called and error is None else ""
    if args.json:
        cause = error.__cause__ if error is not None else None
        raised = f"{type(cause).__name__}: {cause}" if cause is not None else ""
        more = {"target": args.target, "hint": hint, "raised": raised}
        write_json({**more, **told.as_dict()})
    else:
        write(hint or told.text(args.verbose))


NEVER_IN_SCRIPT = (
    "never-called: no graph of this script went through unified (graphs from before a "
    "torch.compiler.reset() in the script are not counted).\n"
    'To use it: torch.compile(model, backend="unified") in the script; '
    'torch.compiler.set_default_backend("unified") where torch has it; or --all, which does that '
    "for this run."
)


def script_of(target: str) -> Path | None:
    """The path, if TARGET is a script: a file, with no function named after it."""
    path = Path(target)
    if target.endswith(".py") or (":" not in target and path.is_file()):
        if not path.is_file():
            raise UsageError(f"there is no script {target!r}.{near_file(path)}")
        return path
    return None


def _explain_script(
    script: Path, args: argparse.Namespace
) -> tuple[Explanation, UserCodeError | None]:
    from kernel_dispatch.explaining import watching

    with watching() as watched:
        error = run_script(script, args)
    return watched.explanation(), error


def run_script(script: Path, args: argparse.Namespace) -> UserCodeError | None:
    """Run it as `python script.py` would; its failure is told after what it did until then."""
    error = None
    with _default_backend(args.all), _as_main(script, args.script_args):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                error = UserCodeError(f"{args.target} left with exit code {leaving.code}")
        except Exception as raised:  # noqa: BLE001  (whatever the user's code raises)
            error = UserCodeError(f"{args.target} raised")
            error.__cause__ = raised
    return error


@contextlib.contextmanager
def _default_backend(wanted: bool) -> Iterator[None]:
    """unified for torch.compile calls that name no backend, while the block runs."""
    if not wanted:
        yield
        return
    import torch

    compiler: Any = torch.compiler
    if not hasattr(compiler, "set_default_backend"):
        raise UsageError(
            f"--all needs torch.compiler.set_default_backend, which torch {torch.__version__} does "
            'not have yet; name backend="unified" in the script.'
        )
    before = compiler.get_default_backend()
    compiler.set_default_backend("unified")
    try:
        yield
    finally:
        compiler.set_default_backend(before)


@contextlib.contextmanager
def _as_main(script: Path, script_args: Sequence[str]) -> Iterator[None]:
    """sys.argv and sys.path as they are for `python script.py args`."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *script_args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def demand_function(args: argparse.Namespace) -> None:
    for given, flag in ((args.script_args, "arguments after -- are"), (args.all, "--all is")):
        if given:
            raise UsageError(f"{flag} for scripts, and {args.target!r} names a function.")


def _explain_function(args: argparse.Namespace) -> Explanation:
    from kernel_dispatch.explaining import explain

    demand_function(args)
    fn, fn_args, fn_kwargs = load(args.target)
    with user_code(f"{args.target} raised"):
        return explain(fn, *fn_args, **fn_kwargs)
