"""`explain(fn, *args)`: compile and run once, and tell all that Dynamo and the backend did."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kernel_dispatch import dynamo
from kernel_dispatch.callables import given_to_torch
from kernel_dispatch.reporting import Report, watched
from lowering.reasons import Reason


@dataclass(frozen=True)
class Explanation:
    """The graphs that were compiled, the frames that Dynamo touched, and what came out."""

    graphs: Report
    frames: tuple[dynamo.Frame, ...]
    refused: tuple[str, ...]
    result: Any

    @property
    def called(self) -> bool:
        """Was the backend given any graph at all?"""
        return bool(self.graphs)

    @property
    def graph_breaks(self) -> list[Reason]:
        """Every place where Dynamo ended a graph before the end of the function."""
        ends = [graph.graph_break for graph in self.graphs if graph.graph_break]
        return ends or [reason for frame in self.frames for reason in frame.breaks]

    @property
    def skipped(self) -> list[Reason]:
        """Functions that Dynamo gave up on: they run as plain Python."""
        return [frame.skipped for frame in self.frames if frame.skipped]

    @property
    def recompiles(self) -> list[str]:
        """Why Dynamo compiled a function again, not counting that explain() is a new backend."""
        return [
            f"{frame.function}: {frame.recompile_reason}"
            for frame in self.frames
            if "BACKEND_MATCH" not in frame.recompile_reason
            and not frame.recompile_reason.endswith(":")  # how torch 2.8 says the same
            and frame.recompile_reason
        ]

    @property
    def never_called(self) -> Reason | None:
        """Why no graph reached the backend; None if one did."""
        if self.called:
            return None
        if self.skipped:
            text = f"the backend was never called: {self.skipped[0].text}"
            return Reason("never-called", text, self.skipped[0].place)
        if self.refused and self.frames:
            frame = self.frames[0]
            text = f"the backend was never called: {frame.function}: {'; then '.join(self.refused)}"
            return Reason("never-called", text, frame.place)
        text = (
            "the backend was never called: the function ran no tensor operation that Dynamo could "
            "capture, is disabled (torch.compiler.disable), or a stance such as force_eager is set"
        )
        return Reason("never-called", text)

    def as_dict(self) -> dict[str, Any]:
        return {
            "called": self.called,
            "never_called": self.never_called and self.never_called.as_dict(),
            "graph_breaks": [reason.as_dict() for reason in self.graph_breaks],
            "skipped": [reason.as_dict() for reason in self.skipped],
            "recompiles": self.recompiles,
            **self.graphs.as_dict(),
        }

    def json(self, indent: int | None = 2) -> str:
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def text(self, verbose: bool = True) -> str:
        lines = [str(self.never_called)] if self.never_called else [self.graphs.text(verbose)]
        lines += [f"graph break: {reason}" for reason in self.graph_breaks]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        lines += [f"recompiled: {text}" for text in self.recompiles]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile `fn` afresh with the settings in force, call it once with the arguments, and tell.

    `fn` is a function, a method, a module, or what torch.compile returned (its own options are then
    used). Graphs that are compiled already stay as they are, and so does what is left of Dynamo's
    recompile limit.
    """
    with watching() as watched, uncompiled(fn):
        result = compiled_afresh(fn)(*args, **kwargs)
    return watched.explanation(result)


def compiled_afresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it was compiled before, if it was, and with nothing of that reused."""
    return unified_apart(fn, _kwargs_of(fn))


def unified_apart(fn: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """`fn` under `unified`, called with these keyword arguments, as a backend object of its own: no
    compilation of before is reused, and none of other code counts against its limit."""
    from kernel_dispatch.backend import unified

    @functools.wraps(unified)
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        return unified(gm, example_inputs, **{**given, **more})

    backend.kwargs = given  # type: ignore[attr-defined]  # as torch's own layer around a backend
    return compiled_apart(fn, backend)


def compiled_apart(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under this backend, in a cache of its own where torch has that."""
    apart: dict[str, Any] = {"isolate_recompiles": True} if _can_isolate() else {}
    return torch.compile(given_to_torch(fn), backend=backend, **apart)


def _can_isolate() -> bool:
    """Newer torch keeps the compilations of one torch.compile call in a cache of their own."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


@contextlib.contextmanager
def uncompiled(fn: Any) -> Iterator[None]:
    """A module that was compiled in place runs as it is, and the limit does not stop explain()."""
    compiled_in_place = getattr(fn, "_compiled_call_impl", None)
    with contextlib.ExitStack() as stack:
        if compiled_in_place is not None:
            fn._compiled_call_impl = None
            stack.callback(setattr, fn, "_compiled_call_impl", compiled_in_place)
        if not _can_isolate():
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1 << 20))
        yield


def _kwargs_of(compiled: Any) -> dict[str, Any]:
    """mode= and options= of an already compiled callable, if it was compiled by us."""
    wrapper = dynamo.wrapper_of(compiled)
    ours = getattr(wrapper, "compiler_name", "") == "unified"
    return dict(wrapper.kwargs) if ours else {}


class watching:
    """Collects what is compiled inside the block, in whatever functions."""

    def __enter__(self) -> watching:
        self._frames = dynamo.FrameLog()
        self.graphs = Report()
        self._watching = watched(self.graphs)
        self._watching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.frames, self.refused = tuple(self._frames.frames()), tuple(self._frames.refused())
        self._watching.__exit__(None, None, None)

    def explanation(self, result: Any = None) -> Explanation:
        return Explanation(self.graphs, self.frames, self.refused, result)
