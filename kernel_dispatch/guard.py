"""What stands around a compiled graph while it runs: count, recover once, remember.

The rules, in the order in which they matter:
 1. An error that eager raises too is the user's: it is raised as eager raises it.
 2. A failure of ours is answered by eager, with the inputs as they were, and said once.
 3. Inputs that the graph writes into are never left half-written behind a result: they are put
    back before eager runs, or, where no copy was taken, the error is raised again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_dispatch.reporting import GraphReport, fell_back
from lowering import observing
from lowering.contract import Graph
from lowering.errors import StrictModeError
from lowering.reasons import Reason

# The first call of a graph that writes into its inputs is rehearsed with copies of them, up to
# this size: lowerings that break do so on their first run. Later calls are not slowed down.
_COPY_LIMIT = 64 << 20


class Guard:
    """A compiled graph that falls back once to eager, says so, and remembers."""

    __slots__ = (
        "_eager",
        "_listens",
        "_lock",
        "_provider",
        "_record",
        "_rehearsed",
        "_run",
        "_written",
        "_written_unknown",
    )

    def __init__(
        self,
        record: GraphReport,
        provider: str,
        run: Graph,
        eager: Graph,
        written: Sequence[int] = (),
        written_unknown: bool = False,
    ) -> None:
        self._record = record
        self._provider = provider
        self._run = run
        self._eager = eager
        self._written = tuple(written)
        self._written_unknown = written_unknown
        self._rehearsed = not self._written or provider == "eager"
        self._lock = threading.Lock()
        self._listens = bool(record.plan.region_rows)

    def __call__(self, *args: Any) -> Any:
        provider, run = self._provider, self._run
        copies = None if self._rehearsed else self._copy_written(args)
        try:
            result = self._listened(run, args) if self._listens else run(*args)
        except Exception as error:
            if provider == "eager":
                raise
            result = self._recover(error, provider, args, copies)
            provider = "eager"
        self._rehearsed = True
        self._record.ran(provider)
        return result

    def _listened(self, run: Graph, args: Sequence[Any]) -> Any:
        """Region kernels that run inside this call are counted for this graph."""
        before, observing.current.listener = observing.current.listener, self._record
        try:
            return run(*args)
        finally:
            observing.current.listener = before

    def _copy_written(self, args: Sequence[Any]) -> dict[int, torch.Tensor] | None:
        tensors = {i: args[i] for i in self._written if isinstance(args[i], torch.Tensor)}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > _COPY_LIMIT or self._written_unknown:
            return None
        with torch.no_grad():
            return {i: tensor.detach().clone() for i, tensor in tensors.items()}

    def _recover(
        self,
        error: Exception,
        provider: str,
        args: Sequence[Any],
        copies: dict[int, torch.Tensor] | None,
    ) -> Any:
        if isinstance(error, StrictModeError):
            raise error
        if (self._written or self._written_unknown) and copies is None:
            error.add_note(
                "kernel_dispatch: this graph writes into its inputs and failed after its first "
                "run, so some of them may be half-written; eager was not tried on top of that."
            ) if hasattr(error, "add_note") else None
            raise error
        _put_back(args, copies)
        try:
            result = self._eager(*args)
        except Exception as users_error:
            raise users_error from None
        with self._lock:
            demoted, self._run, self._provider = self._provider != "eager", self._eager, "eager"
        if demoted:
            reason = Reason(_code(error), str(error) or repr(error), self._record.place)
            try:
                fell_back(self._record, "run", provider, "eager", reason, error)
            except Exception:
                _put_back(args, copies)
                raise
            finally:
                self._record.provider = "eager"
        return result


def _put_back(args: Sequence[Any], copies: dict[int, torch.Tensor] | None) -> None:
    if copies:
        with torch.no_grad():
            for index, copy in copies.items():
                args[index].detach().copy_(copy)


def _code(error: Exception) -> str:
    return "out-of-memory" if isinstance(error, torch.OutOfMemoryError) else "run-failed"


def with_threads(run: Callable[..., Any], threads: int | None) -> Callable[..., Any]:
    """Run under a thread count of its own and put the process's back, whatever happens."""
    if threads is None:
        return run

    def scoped(*args: Any) -> Any:
        before = torch.get_num_threads()
        if before == threads:
            return run(*args)
        torch.set_num_threads(threads)
        try:
            return run(*args)
        finally:
            torch.set_num_threads(before)

    return scoped
