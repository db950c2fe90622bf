"""What torch's recurrent functions return, by its sizes alone: all that capturing a graph needs.

On fake tensors torch goes through every step of the sequence, some ten operators each: minutes for
a thousand steps, and a graph that holds for sequences of this one length only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from lowering.recurrent import results_like

_FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Capturing(threading.local):
    now = False


_capturing = _Capturing()


@contextlib.contextmanager
def told_by_sizes() -> Iterator[None]:
    """On this thread, for fake tensors that nobody takes gradients of or traces."""
    _install()
    before, _capturing.now = _capturing.now, True
    try:
        yield
    finally:
        _capturing.now = before


def _sizes_are_enough(x: Any) -> bool:
    told = _capturing.now and isinstance(x, FakeTensor)
    return told and not torch.is_grad_enabled() and get_proxy_mode() is None


def _padded(x: Tensor, state: Any, weights: Any, *rest: Any) -> tuple[Tensor, ...]:
    *_, bidirectional, batch_first = rest
    return tuple(results_like(x, _states(state), bidirectional, batch_first))


def _packed(x: Tensor, lengths: Tensor, state: Any, weights: Any, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(results_like(x, _states(state), rest[-1], batch_first=False))


def _states(state: Any) -> Sequence[Tensor]:
    return (state,) if isinstance(state, Tensor) else state


_installing = threading.Lock()
_installed = False


def _install() -> None:
    """Before torch's own Python kernels of these operators, for good: they ask who captures."""
    global _installed
    with _installing:
        if _installed:
            return
        for name in _FUNCTIONS:
            for overload, told in (("input", _padded), ("data", _packed)):
                operator = getattr(getattr(torch.ops.aten, name), overload)
                for key in (_IMPLICIT, _AUTOGRAD):
                    operator.py_kernels[key] = _before(operator.py_kernels[key], told)
                operator._dispatch_cache.clear()
        _installed = True


_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOGRAD = torch._C.DispatchKey.Autograd


def _before(steps: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    def results(*args: Any, **kwargs: Any) -> Any:
        enough = not kwargs and _sizes_are_enough(args[0])
        return told(*args) if enough else steps(*args, **kwargs)

    return results
