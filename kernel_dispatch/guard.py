"""What stands around a compiled graph while it runs: count, recover once, remember.

The rules, in the order in which they matter:
 1. An error that eager raises too is the user's: it is raised as eager raises it.
 2. A failure of ours is answered by eager, with the inputs as they were, and said once.
 3. Inputs that the graph writes into are never left half-written behind a result: they are put
    back before eager runs, or, where no copy was taken, the error is raised again, and later
    calls go to eager.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_dispatch import default_backend, dynamo
from kernel_dispatch.reporting import (
    GraphReport,
    chosen_otherwise,
    configured_otherwise,
    fell_back,
)
from kernel_dispatch.settings import in_context
from lowering.contract import Graph
from lowering.errors import StrictModeError
from lowering.errors_in_loops import is_a_wrong_index
from lowering.observing import listened
from lowering.reasons import Reason

# The first call of a graph that writes into its inputs is rehearsed with copies of them, up to
# this size: lowerings that break do so on their first run. Later calls are not slowed down.
_COPY_LIMIT = 64 << 20


class Guard:
    """A compiled graph that falls back once to eager, says so, and remembers."""

    __slots__ = (
        "_eager",
        "_follows_default",
        "_listens",
        "_lock",
        "_record",
        "_rehearsed",
        "_run",
        "_written",
        "_written_unknown",
    )

    def __init__(
        self,
        record: GraphReport,
        run: Graph,
        eager: Graph,
        written: Sequence[int] = (),
        written_unknown: bool = False,
    ) -> None:
        """`run is eager` says that there is nothing to fall back from."""
        self._record = record
        self._run = run
        self._eager = eager
        self._written = tuple(written)
        self._written_unknown = written_unknown
        self._rehearsed = run is eager
        self._lock = threading.Lock()
        self._listens = bool(record.plan.region_rows) and run is not eager
        self._follows_default = record.settings.provider_by_default or not record.settings.provider

    def __call__(self, *args: Any) -> Any:
        run = self._run
        if in_context() and (otherwise := self._record.settings.against_context()):
            configured_otherwise(self._record, otherwise)
        if self._follows_default and default_backend.chosen() != self._record.settings.provider:
            chosen_otherwise(self._record, default_backend.chosen())
        before = None if self._rehearsed else self._remember(args)
        try:
            result = listened(self._record, run, args) if self._listens else run(*args)
        except Exception as error:
            if run is self._eager:
                raise
            result = self._recover(error, args, before)
        self._rehearsed = True
        self._record.ran(self._record.provider)
        return result

    def _remember(self, args: Sequence[Any]) -> _Before:
        """What the first call may change and a failure has to put back."""
        generator = torch.get_rng_state() if self._record.facts.random else None
        tensors = {i: args[i] for i in self._written if _holds_numbers(args[i])}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > _COPY_LIMIT or self._written_unknown:
            return _Before(None, generator)
        with torch.no_grad():
            copies = {i: tensor.detach().clone() for i, tensor in tensors.items()}
        return _Before(copies, generator)

    def _recover(self, error: Exception, args: Sequence[Any], before: _Before | None) -> Any:
        wanted = isinstance(error, StrictModeError) or dynamo.ends_recomputation(error)
        if wanted or dynamo.minifying():
            raise error
        if (self._written or self._written_unknown) and (before is None or before.copies is None):
            _explain_no_second_try(error)
            if not is_a_wrong_index(error):  # by rule 1: what eager would say can't be asked
                self._demote(error, "eager, from the next call on")
            raise error
        _put_back(args, before)
        try:
            result = self._eager(*args)
        except Exception as users_error:
            raise users_error from None
        try:
            self._demote(error)
        except Exception:  # strict mode, or a warning that the user made an error
            _put_back(args, before)
            raise
        return result

    def _demote(self, error: Exception, taken_by: str = "eager") -> None:
        """From now on eager, said once. In strict mode nothing changes: the next call fails too."""
        record = self._record
        with self._lock:
            if self._run is self._eager:  # another thread was faster
                return
            if not record.settings.strict:
                self._run = self._eager
        failed, record.provider = _failed(record), "eager"
        reason = Reason(_code(error), str(error) or repr(error), record.place)
        try:
            fell_back(record, "run", failed, taken_by, reason, error)
        finally:
            if record.settings.strict:
                record.provider = failed


@dataclass(frozen=True)
class _Before:
    """Inputs that the graph writes into (None: too large to copy), and the generator's state."""

    copies: dict[int, torch.Tensor] | None
    generator: torch.Tensor | None


def _failed(record: GraphReport) -> str:
    """Who to name: under plain library calls it is the library, not eager, that broke."""
    libraries = sorted({region.provider for region in record.regions})
    return "+".join(libraries) if record.provider == "eager" and libraries else record.provider


def _explain_no_second_try(error: Exception) -> None:
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(
            "kernel_dispatch: this graph writes into its inputs and failed where no copies of them "
            "were kept, so some may be half-written; eager was not tried on top of that."
        )


def _holds_numbers(value: object) -> bool:
    """Not where the storage was freed, as FSDP does between uses: to copy that kills the process,
    and the graph that writes there brings the storage back before."""
    if not isinstance(value, torch.Tensor):
        return False
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return True
    freed = value.layout is torch.strided and value.untyped_storage().nbytes() == 0
    return not (freed and value.numel())


def _put_back(args: Sequence[Any], before: _Before | None) -> None:
    if before is None:
        return
    if before.generator is not None:
        torch.set_rng_state(before.generator)
    with torch.no_grad():
        for index, copy in (before.copies or {}).items():
            args[index].detach().copy_(copy)


def _code(error: Exception) -> str:
    return "out-of-memory" if isinstance(error, torch.OutOfMemoryError) else "run-failed"
