"""What Dynamo knows while it compiles: the only file that reads torch's private compile state.

Everything here degrades to "unknown" when a newer torch has moved it, and never raises.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.errors import UnifiedError
from lowering.reasons import Reason


def compile_id() -> tuple[str, int]:
    """Dynamo's "frame/version" of the graph being compiled, and the version as a number."""
    current = torch._guards.CompileContext.current_compile_id()
    version = getattr(current, "frame_compile_id", None)
    return (str(current) if current is not None else "-", version or 0)


def recompile_reason() -> str:
    """The guard that failed, when this graph replaces one that was compiled before."""
    from torch._dynamo.utils import get_metrics_context

    metrics = getattr(get_metrics_context(), "_metrics", None) or {}
    return " ".join(str(metrics.get("recompile_reason") or "").split())


def versions() -> int:
    """How many compiled versions the code in work has, this one counted: what the limit is for."""
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    code = _code_in_work()
    if code is None:
        return 0
    try:
        region = eval_frame.get_eval_frame_isolate_recompiles_id()
        return len(eval_frame._get_cache_entries_for_region(code, region)) + 1
    except AttributeError:  # before torch 2.13 a code object had one cache only
        return len(eval_frame._debug_get_cache_entry_list(code)) + 1


def recompile_limit() -> int | None:
    limit = getattr(torch._dynamo.config, "recompile_limit", None)
    return limit if isinstance(limit, int) else None


def graph_break(module: fx.GraphModule) -> Reason | None:
    """Why Dynamo ended this graph, if it was not the end of the function."""
    why = getattr(module, "compile_subgraph_reason", None)
    if why is None or not getattr(why, "graph_break", False):
        return None
    stack = getattr(why, "user_stack", None) or []
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return Reason("graph-break", str(why.reason).split("\n")[0], place)


def owner() -> tuple[Any, str]:
    """The callable that the user gave to torch.compile, and the name of the frame in work.

    Dynamo does not hand it to the backend, but it is on the Python stack: the innermost frame of
    torch's own wrapper around compiled callables.
    """
    wrapped = None
    for frame in _frames():
        if frame.f_code.co_filename.replace("\\", "/").endswith("_dynamo/eval_frame.py"):
            fn = frame.f_locals.get("fn")
            if callable(fn) and "args" in frame.f_locals:
                wrapped = fn
                break
    return wrapped, _frame_name(wrapped)


def wrapper_in_work() -> Any:
    """The object that torch.compile made around our backend for this compilation; it holds the
    options, and equal ones share compiled graphs."""
    for frame in _frames():
        candidate = frame.f_locals.get("self")
        if type(candidate).__name__ == _WRAPPER:
            return candidate
    return None


def wrapper_of(compiled: Any) -> Any:
    """The same object, for a callable that torch.compile returned; None for any other."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    for link in (getattr(compiled, "dynamo_ctx", None), *cells):
        for _ in range(8):
            held = getattr(link, "__dict__", {})
            link = next((held[name] for name in _LINKS if name in held), None)
            if type(link).__name__ == _WRAPPER:
                return link
    return None


_WRAPPER = "_TorchCompileWrapper"
# How torch's layers around a backend hold the next one; the last is what torch 2.8 calls it.
_LINKS = ("callback", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame_name(wrapped: Any) -> str:
    """The function being compiled: after a graph break it is not the one the user named."""
    if (code := _code_in_work()) is not None:
        return str(getattr(code, "co_qualname", None) or _name_before_311(code, wrapped))
    return getattr(wrapped, "__qualname__", type(wrapped).__name__ if wrapped else "?")


def _name_before_311(code: types.CodeType, wrapped: Any) -> str:
    """Code knew only the last part of its name: the rest is its function's."""
    if code.co_name == "inner" and code.co_filename.endswith("external_utils.py"):
        return "wrap_inline.<locals>.inner"
    module = getattr(wrapped, "__self__", wrapped)
    for method in (wrapped, getattr(module, "forward", None)):
        function: Any = getattr(method, "__func__", method)
        if getattr(function, "__code__", None) is code:
            return str(function.__qualname__)
    return code.co_name


def _code_in_work() -> types.CodeType | None:
    """The code object of the frame that Dynamo is compiling."""
    for frame in _frames():
        code = frame.f_locals.get("code")
        if frame.f_code.co_name == "_compile" and isinstance(code, types.CodeType):
            return code
    return None


def writes_inputs() -> bool:
    """AOTAutograd's own word on whether the graph it just compiled writes into an input."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return any(
        info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata
        for info in getattr(metadata, "input_info", ())
    )


def control_flow_errors() -> tuple[type[BaseException], ...]:
    """Exceptions by which torch restarts or skips an analysis: not failures, never swallowed."""
    from torch._dynamo import exc

    names = ("RestartAnalysis", "SkipFrame", "TensorifyScalarRestartAnalysis")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def ends_recomputation(error: BaseException) -> bool:
    """`torch.utils.checkpoint` has all that it came for, and leaves the call: not a failure."""
    from torch.utils import checkpoint

    kind = getattr(checkpoint, "_StopRecomputationError", None)
    return kind is not None and isinstance(error, kind)


def calls_of_other_threads() -> contextlib.AbstractContextManager[Any]:
    """While a backend traces, compiled functions that other threads call run instead of raising.

    FX's mark of a trace in work belongs to the process, and Dynamo takes it for the caller's own.
    Before torch 2.13, which looks twice, such a call runs uncompiled.
    """
    name = "error_on_nested_fx_trace"
    if not hasattr(torch._dynamo.config, name):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(name, False)
    return patched


def minifying() -> bool:
    """The minifier wants to see failures, so nothing may catch them first."""
    return getattr(torch._dynamo.config, "repro_after", None) is not None


_visible: dict[type, type] = {}


def visible(error: UnifiedError) -> BaseException:
    """The same error, in a class that Dynamo lets through as it is.

    Dynamo wraps what a backend raises into BackendCompilerFailed, except its own exceptions. A
    user's typo should arrive as the ValueError that it is.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if kind not in _visible:
        # Dynamo raises it again `from None`, which must not lose the original exception.
        body = {"__module__": kind.__module__, "__cause__": property(lambda self: self.cause)}
        _visible[kind] = type(kind.__name__, (ShortenTraceback, kind), body)
    shown: Any = _visible[kind](*error.args, first_useful_frame=None)
    shown.cause = error.__cause__
    return shown


@dataclass(frozen=True)
class Frame:
    """One attempt of Dynamo at one Python frame, as its own metrics tell it."""

    compile_id: str
    function: str
    place: str
    skipped: Reason | None  # why the frame runs as plain Python
    breaks: tuple[Reason, ...]
    recompile_reason: str


class FrameLog:
    """The frames that Dynamo worked on since this log was made."""

    def __init__(self) -> None:
        self._seen = {id(entry) for entry in self._entries()}
        self._refused = self._unimplemented()

    @staticmethod
    def _unimplemented() -> dict[str, int]:
        from torch._dynamo.utils import counters

        return dict(counters["unimplemented"])

    @staticmethod
    def _entries() -> list[Any]:
        from torch._dynamo.utils import get_compilation_metrics

        return list(get_compilation_metrics())

    def frames(self) -> list[Frame]:
        new = [entry for entry in self._entries() if id(entry) not in self._seen]
        return [_frame(entry) for entry in new if getattr(entry, "co_name", None)]

    def refused(self) -> list[str]:
        """What Dynamo could not trace, without a place: torch 2.8 tells no more than this."""
        return [_headline(text) for text in self._unimplemented() if text not in self._refused]


def _frame(entry: Any) -> Frame:
    place = f"{entry.co_filename}:{entry.co_firstlineno}"
    skipped = None
    if entry.fail_reason:
        at = f"{entry.fail_user_frame_filename}:{entry.fail_user_frame_lineno}"
        text = f"{entry.co_name} runs as plain Python: {_headline(entry.fail_reason)}"
        skipped = Reason("frame-skipped", text, at if entry.fail_user_frame_filename else place)
    breaks = sorted(set(getattr(entry, "restart_reasons", None) or ()))
    return Frame(
        compile_id=str(entry.compile_id),
        function=entry.co_name,
        place=place,
        skipped=skipped,
        breaks=tuple(Reason("graph-break", _headline(text), place) for text in breaks),
        recompile_reason=" ".join(str(getattr(entry, "recompile_reason", "") or "").split()),
    )


def _headline(text: str) -> str:
    """First line and explanation of Dynamo's long message; for a chain, of its first and last."""
    parts = [part.strip().splitlines() for part in str(text).split("***") if part.strip()]
    heads = []
    for lines in parts:
        if "another graph break" in lines[0]:
            continue
        explained = [line.strip() for line in lines if line.strip().startswith("Explanation:")]
        heads.append(" - ".join([lines[0].strip(), *explained[:1]]))
    hint = "; under torch.no_grad() on a CPU, unified captures it" if _RECURRENT in text else ""
    return "; then ".join(heads) + hint


_RECURRENT = "wrap RNN, GRU, or LSTM"
