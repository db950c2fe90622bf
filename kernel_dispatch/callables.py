"""Whom a graph belongs to: modules, functions and bound methods, in whatever form we are given."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kernel_dispatch import dynamo


def given_to_torch(fn: Any) -> Any:
    """What torch.compile was called with, for what it returned; anything else as it is."""
    if dynamo.wrapper_of(fn) is None:
        return fn
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def origin(fn: Any) -> Any:
    """The module, function or bound method inside: the owner of its graphs."""
    fn = getattr(fn, "_orig_mod", fn)
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    for _ in range(8):  # wrappers of wrappers, as torch nests them
        if isinstance(fn, torch.nn.Module):
            return getattr(fn, "_orig_mod", fn)
        if isinstance(fn, types.MethodType):
            return fn.__self__ if isinstance(fn.__self__, torch.nn.Module) else fn
        if not hasattr(fn, "__wrapped__"):
            return fn
        fn = fn.__wrapped__
    return fn


def same(owner: Any, wanted: Any) -> bool:
    """Every look at a bound method makes a new object; those are equal, not identical."""
    return bool(owner == wanted) if isinstance(wanted, types.MethodType) else owner is wanted


def code_of(owner: Any) -> types.CodeType | None:
    """The code that Dynamo's cache hangs on: equal compilations of it share their graphs."""
    if isinstance(owner, torch.nn.Module):
        owner = type(owner).forward
    return getattr(owner, "__code__", None)


def reference(owner: Any) -> Callable[[], Any]:
    """A weak reference, so that a report keeps no model alive."""
    try:
        if isinstance(owner, types.MethodType):
            return weakref.WeakMethod(owner)
        return weakref.ref(owner)
    except TypeError:  # builtins cannot be referenced weakly, and live for ever anyway
        return lambda: owner
