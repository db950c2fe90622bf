"""The command line: `kernel-dispatch`, or `python -m kernel_dispatch`.

Results go to stdout, errors to stderr. Exit code 0: fine, 1: problems found, 2: wrong usage.
Torch is imported by the commands that need it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernel_dispatch import __version__
from kernel_dispatch.terminal import Style, style_of, write
from lowering.errors import StrictModeError, UnifiedError, nearest

if TYPE_CHECKING:
    from kernel_dispatch.explaining import Explanation
    from lowering.contract import Probe, Target

OK, PROBLEMS, USAGE = 0, 1, 2


class UsageError(UnifiedError):
    """The command line names something that is not there or cannot be used."""


class UserCodeError(Exception):
    """The user's own code raised; the cause is what it raised."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is the script's own, whatever it looks like.
    split = arguments.index("--") if "--" in arguments else len(arguments)
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
        _print_user_error(error)
        return PROBLEMS
    except UnifiedError as error:
        write(f"kernel-dispatch: {error}", sys.stderr)
        return PROBLEMS if isinstance(error, StrictModeError) else USAGE
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
  kernel-dispatch explain shop.model:build    compile it with `unified` and tell what happened
  kernel-dispatch explain train.py -- --epochs 1

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
  kernel-dispatch explain shop.model:build --level O1
  kernel-dispatch explain bench/net.py:forward --device cpu --verbose
  kernel-dispatch explain train.py --all --json -- --epochs 1 > report.json

exit code: 0 fine, 1 no graph reached unified or the code raised, 2 wrong usage."""


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
        made.add_argument("--json", action="store_true", help="for programs")
        made.set_defaults(command=run, needs_torch=name != "levels")
        return made

    command("doctor", _doctor, "what is here, what is missing, and the command that fixes it")
    command("devices", _devices, "every target: present, or absent and why")
    explain = command(
        "explain",
        _explain,
        "compile and run a function or a script, and tell what unified did",
        description=_EXPLAIN,
        epilog=_EXPLAIN_EXAMPLES,
    )
    _add_explain_arguments(explain)
    command("levels", _levels, "what O0 to O3 may do and what they promise")
    command("options", _options, "every option, its environment variable and its default")
    return parser


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="module:function, file.py:function or script.py"
    )
    parser.add_argument("--level", help="O0, O1, O2 or O3, instead of UNIFIED_LEVEL")
    parser.add_argument("--device", help="force a target (cpu, cuda:1), instead of UNIFIED_DEVICE")
    parser.add_argument(
        "--all", action="store_true", help="in a script: make unified the default backend"
    )
    parser.add_argument("--verbose", action="store_true", help="also what was rejected, and why")


# --- doctor, devices, levels, options -------------------------------------------------------------


def _doctor(args: argparse.Namespace) -> int:
    from kernel_dispatch import doctor

    rows = doctor.diagnose(doctor.collect())
    write(doctor.as_json(rows) if args.json else doctor.render(rows, style_of(sys.stdout)))
    return doctor.exit_code(rows)


def _devices(args: argparse.Namespace) -> int:
    from kernel_dispatch.doctor import probed_targets

    found = probed_targets()
    if args.json:
        _write_json([_target_record(target, probe) for target, probe in found])
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
    from kernel_dispatch.doctor import shown_version

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
    from kernel_dispatch.doctor import gib

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
        _write_json(records)
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
    from kernel_dispatch.doctor import shown_value
    from kernel_dispatch.settings import OPTIONS, resolve

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
        _write_json(records)
        return OK
    style = style_of(sys.stdout)
    for one in records:
        write(f"{style.bold(str(one['name']))}  {one['summary']}")
        write(f"    accepted     {one['accepted']}")
        write(f"    default      {shown_value(one['default'])}")
        write(f"    environment  {one['env'] or 'none'}")
    return OK


def _write_json(value: Any) -> None:
    write(json.dumps(value, indent=2, default=str))


# --- explain --------------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    from kernel_dispatch.settings import OPTIONS, configure

    given = {option: getattr(args, option.name, None) for option in OPTIONS}
    # Read here, so that an error names the flag as its source.
    wishes = {o.name: o.parse(v, f"--{o.name}") for o, v in given.items() if v is not None}
    with configure(**wishes):
        _demand_settings()
        # With --json, what the user's code prints must not end up inside of the JSON.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            script = _script_of(args.target)
            if script is not None:
                told, error = _explain_script(script, args)
            else:
                told, error = _explain_function(args), None
        _tell(told, error, args, script is not None)
    if error is not None:
        _print_user_error(error)
    return PROBLEMS if error is not None or not told.called else OK


def _demand_settings() -> None:
    """Bad settings, and a forced device that is absent, are told before any code of the user."""
    from kernel_dispatch.doctor import probed_targets, refused_device
    from kernel_dispatch.settings import resolve

    settings = resolve()
    if settings.device is not None:
        source = dict(settings.sources)["device"]
        source = "--device" if source == "configure()" else source
        fix, refused = refused_device(str(settings.device), source, probed_targets())
        if refused:
            raise UsageError(f"{refused} {fix}".strip())


def _tell(
    told: Explanation, error: UserCodeError | None, args: argparse.Namespace, script: bool
) -> None:
    hint = _NEVER_IN_SCRIPT if script and not told.called and error is None else ""
    if args.json:
        cause = error.__cause__ if error is not None else None
        raised = f"{type(cause).__name__}: {cause}" if cause is not None else ""
        more = {"target": args.target, "hint": hint, "raised": raised}
        _write_json({**more, **told.as_dict()})
    else:
        write(hint or told.text(args.verbose))


_NEVER_IN_SCRIPT = (
    "never-called: no graph of this script went through unified (graphs from before a "
    "torch.compiler.reset() in the script are not counted).\n"
    'To use it: torch.compile(model, backend="unified") in the script; '
    'torch.compiler.set_default_backend("unified") where torch has it; or --all, which does that '
    "for this run."
)


def _script_of(target: str) -> Path | None:
    """The path, if TARGET is a script: a file, with no function named after it."""
    path = Path(target)
    if target.endswith(".py") or (":" not in target and path.is_file()):
        if not path.is_file():
            raise UsageError(f"there is no script {target!r}.{_near_file(path)}")
        return path
    return None


def _near_file(path: Path) -> str:
    beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
    guess = nearest(path.name, (one.name for one in beside))
    return f" Did you mean {str(path.parent / guess)!r}?" if guess else ""


def _explain_script(
    script: Path, args: argparse.Namespace
) -> tuple[Explanation, UserCodeError | None]:
    """Run it as `python script.py` would; its failure is told after what it did until then."""
    from kernel_dispatch.explaining import watching

    error = None
    with watching() as watched, _default_backend(args.all), _as_main(script, args.script_args):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                error = UserCodeError(f"{args.target} left with exit code {leaving.code}")
        except Exception as raised:  # noqa: BLE001  (whatever the user's code raises)
            error = UserCodeError(f"{args.target} raised")
            error.__cause__ = raised
    return watched.explanation(), error


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


def _explain_function(args: argparse.Namespace) -> Explanation:
    from kernel_dispatch.explaining import explain

    for given, flag in ((args.script_args, "arguments after -- are"), (args.all, "--all is")):
        if given:
            raise UsageError(f"{flag} for scripts, and {args.target!r} names a function.")
    module, found = _find(args.target)
    fn, fn_args, fn_kwargs = _with_inputs(args.target, module, found)
    with _user_code(f"{args.target} raised"):
        return explain(fn, *fn_args, **fn_kwargs)


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Whatever is raised inside is the user's; our own errors pass, one line is enough for them."""
    try:
        yield
    except UnifiedError:
        raise
    except SystemExit as leaving:
        raise UserCodeError(f"{what}: it left with exit code {leaving.code}") from leaving
    except Exception as error:
        raise UserCodeError(what) from error


def _find(target: str) -> tuple[ModuleType, Any]:
    """The module and the object that `module:function` or `file.py:function` names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise UsageError(f"{target!r} names no function: write module:function or script.py.")
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [one for one, value in vars(found).items() if callable(value) and one[0] != "_"]
            guess = nearest(part, names)
            hint = f" Did you mean {guess!r}?" if guess else ""
            listed = ", ".join(sorted(names)[:20]) or "none"
            raise UsageError(f"{where} has no {name!r}.{hint} Callables there: {listed}.")
        found = getattr(found, part)
    return module, found


def _load_module(name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        with _user_code(f"importing {name} raised"):
            return importlib.import_module(name)
    except UserCodeError as error:
        missing = error.__cause__
        # Only the named module itself: a missing import *inside* of it is the user's traceback.
        if isinstance(missing, ModuleNotFoundError) and f"{name}.".startswith(f"{missing.name}."):
            text = f"there is no module {missing.name!r} (current folder: {here})."
            raise UsageError(f"{text}{_near_module(str(missing.name))}") from None
        raise


def _near_module(name: str) -> str:
    parent, _, last = name.rpartition(".")
    paths = list(getattr(sys.modules.get(parent), "__path__", ())) if parent else [os.getcwd()]
    guess = nearest(last, (one.name for one in pkgutil.iter_modules(paths)))
    if guess is None:
        return ""
    return f" Did you mean {f'{parent}.{guess}' if parent else guess!r}?"


def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file {path!r}.{_near_file(file)}")
    sys.path.insert(0, str(file.resolve().parent))  # its neighbours, as for a script
    # A name of our own: random.py must not pass for `random`.
    spec = importlib.util.spec_from_file_location(f"explained_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _user_code(f"importing {path} raised"):
        spec.loader.exec_module(module)
    return module


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _with_inputs(target: str, module: ModuleType, found: Any) -> Call:
    """(a) a builder of function and inputs, (b) a function without arguments, (c) neither."""
    import torch

    if not callable(found):
        raise UsageError(f"{target} is of type {type(found).__name__}, not a function or a module.")
    if isinstance(found, torch.nn.Module) or (needed := _needed_arguments(found)):
        if isinstance(found, type):
            raise UsageError(f"the class {target} needs arguments ({needed}): name a function.")
        needed = _needed_arguments(getattr(found, "forward", found))
        if needed or hasattr(module, "example_inputs"):
            return _with_example_inputs(target, module, found, needed)
        return found, (), {}
    with _user_code(f"{target}() raised"):
        made = found()
    if isinstance(made, torch.nn.Module):  # a class or a factory
        return _with_inputs(f"the module that {target}() gives", module, made)
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        return _built(target, made)
    return found, (), {}


def _needed_arguments(fn: Any) -> str:
    """Names of the arguments without a default; empty if it can be called with none."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # written in C
        return "of unknown names"
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (p for p in parameters if p.default is p.empty and p.kind not in collecting)
    return ", ".join(p.name for p in needed)


def _built(target: str, made: tuple[Any, ...]) -> Call:
    fn, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise UsageError(
            f"{target}() gives ({', '.join(type(one).__name__ for one in made)}): the second must "
            f"be a tuple of arguments, the third, if any, a dict of keyword arguments."
        )
    return fn, tuple(args), dict(kwargs)


def _with_example_inputs(target: str, module: ModuleType, fn: Any, needed: str) -> Call:
    if not hasattr(module, "example_inputs"):
        raise UsageError(
            f"{target} needs arguments ({needed}), and {module.__name__} has no `example_inputs`: "
            f"add one, or name a function without arguments that returns (function, args)."
        )
    given = module.example_inputs
    if callable(given):
        with _user_code(f"{module.__name__}.example_inputs() raised"):
            given = given()
    if isinstance(given, Mapping):
        return fn, (), dict(given)
    return fn, tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


def _print_user_error(error: UserCodeError) -> None:
    """One line, then the traceback from the user's first line on: ours is of no use to them."""
    write(f"kernel-dispatch: {error}", sys.stderr)
    cause = error.__cause__
    if cause is None or isinstance(cause, SystemExit):
        return
    trace = cause.__traceback__
    while trace is not None and _is_plumbing(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = traceback.format_exception(type(cause), cause, trace or cause.__traceback__)
    write("".join(shown).rstrip(), sys.stderr)


def _is_plumbing(file: str) -> bool:
    """Is a frame on the way to the user's code: ours, the import system's, or torch's?"""
    if file.startswith("<frozen") or file in (runpy.__file__, importlib.__file__):
        return True
    torch = getattr(sys.modules.get("torch"), "__file__", None) or __file__
    return any(Path(one).parent in Path(file).parents for one in (__file__, torch))


if __name__ == "__main__":
    sys.exit(main())
