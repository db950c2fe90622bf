"""A model that is compiled, and is still the model: same class, same state, same methods.

`torch.compile(model)` returns a wrapper whose state_dict has other keys, and `model.compile()`
changes the caller's object. So we make a second object of the same class over the same state
(parameters, buffers, submodules, hooks) and compile that one's call: what is loaded, trained or
hooked in one shows in the other, and the caller's own object stays as it was.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kernel_dispatch.backend import unified
from lowering.errors import SettingError


@dataclass(frozen=True)
class Prepared:
    """How a model was prepared: what `optimize_for_...` keeps when it is given that model."""

    options: Mapping[str, Any] = field(default_factory=dict)
    as_written: bool = True  # computes what the caller wrote: no cast, no mode of its own


# Beside the models and not in them: a pickled or copied model needs nothing of ours.
_prepared: weakref.WeakKeyDictionary[nn.Module, Prepared] = weakref.WeakKeyDictionary()


def how(model: nn.Module) -> Prepared | None:
    """How this very object was prepared; None for any other, copies included."""
    return _prepared.get(model)


def prepare(
    model: nn.Module,
    options: Mapping[str, Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> nn.Module:
    """A twin of `model` whose calls go through `unified`; `around` wraps the compiled call."""
    twin = _twin(model)
    # By itself, not by its name: of two threads that look the name up first, torch fails one.
    compiled = torch.compile(_callable(twin), backend=unified, options=dict(options))
    twin._compiled_call_impl = compiled if around is None else around(compiled)
    _prepared[twin] = Prepared(dict(options), as_written=around is None)
    return twin


def plain(model: object) -> nn.Module:
    """The module itself, out of the wrapper of torch.compile where it is in one."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        raise SettingError(f"a backend takes a torch.nn.Module, not {_said(model)}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise SettingError(
            "a backend takes a torch.nn.Module as it was written; this one is TorchScript, which "
            "torch.compile does not take."
        )
    inner = getattr(model, "_orig_mod", model)
    module: nn.Module = inner if isinstance(inner, nn.Module) else model
    if any(is_lazy(one) for one in (*module.parameters(), *module.buffers())):
        raise SettingError(
            f"{type(module).__name__} has lazy parameters, whose sizes are not known yet: call it "
            f"once with a sample before a backend prepares it."
        )
    return module


def _said(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:80]


def _twin(model: nn.Module) -> nn.Module:
    # Not copy.copy: it asks __getstate__, and DistributedDataParallel's drops what it needs.
    twin: nn.Module = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    twin.__dict__.pop("_compiled_call_impl", None)
    return twin


def _callable(module: nn.Module) -> Callable[..., Any]:
    """The module's call, as a function with a code object of its own.

    Given the bound method, as `nn.Module.compile` gives it, Dynamo would compile nothing of
    `nn.Sequential`, without a word, because that is torch's own code; and since it keeps and limits
    compiled graphs by code, a class prepared at four levels would use up its limit.
    """
    call = module._call_impl

    @functools.wraps(call)
    def around(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # What Dynamo learns of sizes that vary, it keeps by file, line and name: a number keeps those
    # of one model apart from another's. Readers see the qualified name.
    named = {"co_name": f"{type(module).__name__}_{next(_numbers)}"}
    if sys.version_info >= (3, 11):
        named["co_qualname"] = type(module).__qualname__
    around.__code__ = around.__code__.replace(**named)  # type: ignore[attr-defined]
    around.__qualname__ = type(module).__qualname__
    return around


_numbers = itertools.count()


# --- what the compiled call is wrapped in ---------------------------------------------------------


def without_gradients(dtype: torch.dtype | None) -> Callable[..., Callable[..., Any]]:
    """Calls without autograd; numbers with a fraction come in as `dtype` where one is given."""

    def around(compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if dtype is not None:
                args, kwargs = cast(args, dtype), cast(kwargs, dtype)
            with torch.no_grad():
                return compiled(*args, **kwargs)

        return call

    return around


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Calls inside a context of their own, such as autocast."""

    def around(compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return compiled(*args, **kwargs)

        return call

    return around


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors as `dtype`, wherever they are in the arguments."""
    from kernel_dispatch.backends.moving import each_tensor

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return each_tensor(values, one)
