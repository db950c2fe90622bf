"""What Dynamo is told while it captures a graph for this backend: to look into recurrent layers.

By itself it runs a function that holds an LSTM, GRU or RNN module as plain Python, all of it, since
backends would take such a layer apart step by step. Here it is a region where a graph is for
inference and for the CPU, so Dynamo's own switch (`torch._dynamo.config.allow_rnn`) is on for these
captures, and as the user has it for all others.

Loaded together with the backend's name, so it imports nothing but what is there when torch asks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_SWITCH = "allow_rnn"


def watch(backend: Callable[..., Any]) -> None:
    """From now on, whenever Dynamo starts to capture. A torch without such callbacks stays as it
    is: functions with recurrent layers are plain Python then."""
    import torch._dynamo

    handler = getattr(torch._dynamo, "callback_handler", None)
    watcher = _Watcher(backend)
    for name, call in (("start_callbacks", watcher.begin), ("end_callbacks", watcher.end)):
        if isinstance(getattr(handler, name, None), list):
            setattr(handler, name, _Staying(getattr(handler, name), call))


class _Staying(list[Callable[..., None]]):
    """torch.compiler.reset() clears the callbacks; this one is not the user's, and stays."""

    def __init__(self, others: Iterable[Callable[..., None]], staying: Callable[..., None]) -> None:
        super().__init__([*others, staying])
        self._staying = staying

    def clear(self) -> None:
        self[:] = [self._staying]


class _Watcher(threading.local):
    """Of each thread by itself: when two overlap, Dynamo tells only the first begin and the last
    end, and what one thread switched on is undone by its own next begin at the latest."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._switched = contextlib.ExitStack()

    def begin(self, *_: Any) -> None:
        self.end()
        try:
            compiler, values = _in_work()
            asked = _asked_of(self._backend, compiler)
            if asked is not None and _infers_on_the_cpu(asked, values):
                import torch

                from kernel_dispatch.recurrent_sizes import told_by_sizes

                with contextlib.ExitStack() as switched:
                    switched.enter_context(told_by_sizes())
                    switched.enter_context(torch._dynamo.config.patch(_SWITCH, True))
                    self._switched = switched.pop_all()
        except Exception:  # noqa: BLE001  (then it is as it is without us)
            return

    def end(self, *_: Any) -> None:
        self._switched.close()


def _in_work() -> tuple[Any, Any]:
    """Whom Dynamo captures for, and the variables of the function that it captures."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals:
            return frame.f_locals["compiler_fn"], frame.f_locals.get("locals")
        frame = frame.f_back
    return None, None


# How torch's layers around a backend hold the next one, and functions the one they stand for.
_LINKS = ("compiler_fn", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "__wrapped__")


def _asked_of(backend: Callable[..., Any], compiler: Any) -> dict[str, Any] | None:
    """The keyword arguments that the layers above the backend have for it; None: it is another."""
    asked: dict[str, Any] = {}
    for _ in range(8):
        if compiler is backend:
            return asked
        held = getattr(compiler, "__dict__", {})
        asked = held.get("kwargs") or getattr(compiler, "keywords", None) or asked
        below = next((held[name] for name in _LINKS if name in held), None)
        compiler = below or getattr(compiler, "func", None)
    return None


def _infers_on_the_cpu(asked: dict[str, Any], values: Any) -> bool:
    """Gradients would need every step's own; on other devices the layer is the vendor's."""
    import torch

    from kernel_dispatch.settings import resolve

    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    try:
        settings = resolve(asked.get("mode"), asked.get("options"))
    except Exception:  # noqa: BLE001  (the backend says what is wrong, once it has a graph)
        return True
    if "eager" in settings.disable:  # who keeps such layers whole
        return False
    if settings.device is not None:
        return settings.device.target == "cpu"
    return _devices(values) <= {"cpu"}


def _devices(values: Any) -> set[str]:
    """Of the tensors among them, and of the first parameter of each module."""
    import torch
    from torch.utils import _pytree as pytree

    found = set()
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.nn.Module):
            value = next(value.parameters(), None)
        if isinstance(value, torch.Tensor):
            found.add(value.device.type)
    return found
