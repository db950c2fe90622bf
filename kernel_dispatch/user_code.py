"""The user's own code, named on a command line: find it, load it, build its inputs.

The user's errors come out as the user's: one line, then a traceback that starts in their code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kernel_dispatch.terminal import write
from lowering.errors import UnifiedError, nearest


class UsageError(UnifiedError):
    """The command line names something that is not there or cannot be used."""


class UserCodeError(Exception):
    """The user's own code raised; the cause is what it raised."""


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def named(target: str) -> Any:
    """The object itself."""
    return _find(target)[1]


def load(target: str) -> Call:
    """What `module:function` or `file.py:function` names, ready to be called."""
    module, found = _find(target)
    return _with_inputs(target, module, found)


def near_file(path: Path) -> str:
    beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
    guess = nearest(path.name, (one.name for one in beside))
    return f" Did you mean {str(path.parent / guess)!r}?" if guess else ""


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
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
        with user_code(f"importing {name} raised"):
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
        raise UsageError(f"there is no file {path!r}.{near_file(file)}")
    sys.path.insert(0, str(file.resolve().parent))  # its neighbours, as for a script
    # A name of our own: random.py must not pass for `random`.
    spec = importlib.util.spec_from_file_location(f"named_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with user_code(f"importing {path} raised"):
        spec.loader.exec_module(module)
    return module


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
    with user_code(f"{target}() raised"):
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
        with user_code(f"{module.__name__}.example_inputs() raised"):
            given = given()
    if isinstance(given, Mapping):
        return fn, (), dict(given)
    return fn, tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


def print_user_error(error: UserCodeError) -> None:
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
