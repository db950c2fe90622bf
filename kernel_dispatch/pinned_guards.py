"""Guards on modules and weights that are not asked one by one while nobody changes anything.

Torch asks in every call, of each module and weight, whether it is as it was when the graph was
compiled: thousands of questions, whose answers lie all over the memory. Here they are put to the
dictionaries of the model instead, which have a number that changes with every change. Where one
changed, torch's own guards decide as before, and only they ever say no: a model may be changed at
any time, as it may with any other backend.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_dispatch.pin_plan import Arguments, Hold, Parts, Plan, divide
from kernel_dispatch.reporting import GraphReport
from lowering.native import library

log = logging.getLogger(__name__)

# Fewer are asked in no time.
_WORTH_PINNING = 16
# A model that changed as often, each time within a second, writes into itself in each call.
_MOST_CHANGES, _SECONDS = 16, 1.0
# As many models, or layers of one, may share a graph: more are new ones in each call.
_MOST_MODELS = 256

# By what Dynamo knows of a graph that it compiles.
_to_be_pinned: weakref.WeakKeyDictionary[Any, GraphReport] = weakref.WeakKeyDictionary()
_installing = threading.Lock()
_installed: list[bool] = []


def wanted(record: GraphReport) -> None:
    """For the code whose graph is being compiled: its guards are built when the backend is done."""
    context = torch._guards.TracingContext.try_get()
    if context is None or library.pin([], [], [], []) is None:
        return
    with _installing:
        if not _installed:
            _installed.append(_install())
    _to_be_pinned[context] = record


def _install() -> bool:
    from torch._dynamo import guards

    manager = getattr(guards, "CheckFunctionManager", None)
    build = getattr(manager, "build_guards", None)
    if manager is None or build is None:  # torch has moved it
        return False

    @functools.wraps(build)
    def build_guards(self: Any, some: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return _built(self, some, lambda some: build(self, some, *args, **kwargs))

    manager.build_guards = build_guards
    return True


def _built(manager: Any, guards: Sequence[Any], build: Callable[[Sequence[Any]], Any]) -> Any:
    graph: Any = getattr(manager, "output_graph", None)
    context = getattr(graph, "tracing_context", None)
    record = None if context is None else _to_be_pinned.get(context)
    if record is None or graph.export:
        return build(guards)
    try:
        parts = divide(guards, graph.local_scope, graph.global_scope)
        if len(parts.pinned) < _WORTH_PINNING:
            return build(guards)
        found = _in_two_parts(parts, build)
        record.guards = (len(parts.pinned), len(parts.asked))
        return found
    except Exception:  # whatever torch has moved: then as torch does it
        log.info("guards are not pinned", exc_info=True)
        return build(guards)


def _in_two_parts(parts: Parts, build: Callable[[Sequence[Any]], Any]) -> Any:
    # With the inputs, since none may be a tensor of the model's.
    builder_of_pinned, authority = build(parts.pinned + parts.inputs)
    _forbid_aliases(builder_of_pinned)
    builder, wrapper = build(parts.asked)
    builder.id_matched_objs.update(builder_of_pinned.id_matched_objs)
    unchanged = Unchanged(parts.plan, authority)
    _with_stack(wrapper.root.add_epilogue_lambda_guard, unchanged, ["the modules are as they were"])
    wrapper.__class__ = _wrapper()
    wrapper.unchanged = unchanged
    return builder, wrapper


def _forbid_aliases(builder: Any) -> None:
    from torch._C._dynamo.guards import install_no_tensor_aliasing_guard

    names = builder.no_tensor_aliasing_names
    if len(names) > 1:
        text = [f"check_no_aliasing({', '.join(names)})"]
        managers = builder.no_tensor_aliasing_guard_managers
        _with_stack(install_no_tensor_aliasing_guard, managers, names, text)


def _with_stack(add: Callable[..., Any], *args: Any) -> None:
    """Newer versions of torch also take the user's stack."""
    try:
        add(*args, None)
    except TypeError:
        add(*args)


@functools.cache
def _wrapper() -> type:
    """Torch's, that also tells of what is pinned: which guard failed, and what there is."""
    from torch._dynamo.guards import GuardManagerWrapper

    class WithPinned(GuardManagerWrapper):
        unchanged: Unchanged

        def check_verbose(self, x: Any) -> Any:
            found = self.unchanged.authority.check_verbose(x)
            return super().check_verbose(x) if found.result else found

        def __str__(self) -> str:
            return f"{super().__str__()}\nPinned:{self.unchanged.authority}"

    return WithPinned


def _never(arguments: Arguments) -> bool:
    return False


class Pinned(NamedTuple):
    hold: Hold = _never
    changes: int = 0
    when: float = -math.inf


class Unchanged:
    """Asked in every call: are the modules and weights as the graph needs them?"""

    def __init__(self, plan: Plan, authority: Any) -> None:
        self.authority = authority
        self._plan = plan
        self._latest: Hold = _never
        self._of_model: dict[tuple[int, ...], Pinned] = {}

    def __call__(self, arguments: Arguments) -> bool:
        return self._latest(arguments) or self._in_full(arguments)

    def _in_full(self, arguments: Arguments) -> bool:
        model = self._plan.whose(arguments)
        known = self._of_model.get(model, Pinned())
        if known.hold is not self._latest and known.hold(arguments):
            self._latest = known.hold
            return True
        if not self.authority.check(arguments):
            return False
        self._pin_anew(model, known, arguments)
        return True

    def _pin_anew(self, model: tuple[int, ...], known: Pinned, arguments: Arguments) -> None:
        now = time.monotonic()
        changes = known.changes + 1 if now - known.when < _SECONDS else 1
        if len(self._of_model) >= _MOST_MODELS:
            self._of_model.clear()
        hold = self._plan.pin(arguments) if changes <= _MOST_CHANGES else None
        self._latest = hold or _never
        self._of_model[model] = Pinned(self._latest, changes, now)
