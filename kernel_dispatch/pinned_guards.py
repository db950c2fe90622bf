"""Guards on modules and weights that are not asked one by one while nobody changes anything.

Torch asks in every call, of each module and weight, whether it is as it was when the graph was
compiled: thousands of questions, whose answers lie all over the memory. Here they are put to the
dictionaries of the model instead, which have a number that changes with every change. Where one
changed, torch's own guards decide as before, and only they ever say no: a model may be changed at
any time, as it may with any other backend.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kernel_dispatch.pin_plan import Arguments, Parts, Plan, divide
from kernel_dispatch.reporting import GraphReport
from lowering.native import library
from lowering.native.library import Hold

log = logging.getLogger(__name__)

# Fewer are asked in no time.
_WORTH_PINNING = 16
# As many models, or layers of one, may share a graph and be pinned.
_MOST_MODELS = 128
# Seconds of pinning that a graph may have at once, and as a part of all time.
_AT_FIRST, _SHARE = 0.03, 0.02

# Which argument behind the guards says that they are saved; behind it is a filter of the user's.
_SAVES = 3

# By what Dynamo knows of a graph that it compiles.
_to_be_pinned: weakref.WeakKeyDictionary[Any, GraphReport] = weakref.WeakKeyDictionary()
_installing = threading.Lock()
_installed: list[bool] = []


def wanted(record: GraphReport) -> None:
    """For the code whose graph is being compiled: its guards are built when the backend is done."""
    context = torch._guards.TracingContext.try_get()
    if context is None or record.target != "cpu" or library.pin_plan([], {}, []) is None:
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
        def build_as_torch_does(some: Sequence[Any]) -> Any:
            return build(self, some, *args, **kwargs)

        if any(args[_SAVES:]) or kwargs.get("save_guards"):  # for another process: all in one piece
            return build_as_torch_does(some)
        return _built(self, some, build_as_torch_does)

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
    wrapper.pinned_sources = list(builder_of_pinned.no_tensor_aliasing_names)
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
        pinned_sources: list[str]
        _asked_sources: list[str] = []  # noqa: RUF012  (never changed in place)

        @property
        def no_tensor_aliasing_sources(self) -> list[str]:
            return self.pinned_sources or self._asked_sources

        @no_tensor_aliasing_sources.setter
        def no_tensor_aliasing_sources(self, sources: list[str]) -> None:
            self._asked_sources = sources

        def check_verbose(self, x: Any) -> Any:
            found = self.unchanged.authority.check_verbose(x)
            return super().check_verbose(x) if found.result else found

        def __str__(self) -> str:
            return f"{super().__str__()}\nPinned:{self.unchanged.authority}"

    return WithPinned


def _never(arguments: Arguments) -> bool:
    return False


class Unchanged:
    """Asked in every call: are the modules and weights as the graph needs them?"""

    def __init__(self, plan: Plan, authority: Any) -> None:
        self.authority = authority
        self._plan = plan
        self._latest: Hold = _never
        self._of_model: dict[tuple[int, ...], Hold] = {}
        self._budget = Budget()

    def __call__(self, arguments: Arguments) -> bool:
        return self._latest(arguments) or self._in_full(arguments)

    def _in_full(self, arguments: Arguments) -> bool:
        model = self._plan.whose(arguments)
        known = self._of_model.get(model, _never)
        if known is not self._latest and known(arguments):
            self._latest = known
            return True
        if not self.authority.check(arguments):
            return False
        hold = self._pin(arguments)
        if hold is None:
            return True
        # Another thread may have changed the model before it was pinned, but what is pinned holds
        # only for what torch's guards say yes to now: a later change is noticed.
        if not self.authority.check(arguments):
            return False
        if len(self._of_model) >= _MOST_MODELS:
            self._of_model.clear()
        self._latest = self._of_model[model] = hold
        return True

    def _pin(self, arguments: Arguments) -> Hold | None:
        if self._plan.pin is None or not self._budget.allows():
            return None
        with self._budget.spent():
            return self._plan.pin(arguments)


class Budget:
    """Of the time for pinning models that change, or are new ones, in every call."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._spent = 0.0

    def allows(self) -> bool:
        return self._spent < _AT_FIRST + _SHARE * (time.perf_counter() - self._since)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - begin
