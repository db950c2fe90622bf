"""Did the peer really run? Several of them fall back, to eager or to Inductor, without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from kernel_dispatch.bench import ContenderWarning

_LONGEST = 300


class PeerError(RuntimeError):
    """The peer does not take this case, or something else ran in its place."""


class PartlyEager(ContenderWarning):
    """The peer ran, but left some operators to eager."""


Watch = Callable[[], contextlib.AbstractContextManager[Any]]


def watched(call: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """`call`, whose first run happens inside `watch`, which raises if the peer did not run."""
    seen = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen:
            return call(*args, **kwargs)
        with one_clear_line(), watch():
            output = call(*args, **kwargs)
        seen = True
        return output

    return run


@contextlib.contextmanager
def one_clear_line() -> Iterator[None]:
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(reason(error)) from error


def reason(error: BaseException) -> str:
    """What went wrong first, in a line: exporters and compilers wrap it in pages of advice."""
    first = error
    while (cause := getattr(first, "inner_exception", None) or first.__cause__) is not None:
        first = cause
    lines = [line.strip() for line in str(first).splitlines()]
    text = next((line for line in lines if line), "")
    return f"it raised {type(first).__name__}: {shortened(text)}".removesuffix(": ")


def shortened(text: str) -> str:
    """On one line, and no longer than a reader of a table can bear."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


@contextlib.contextmanager
def dynamo_graphs() -> Iterator[None]:
    """Dynamo captured something: code it cannot capture it leaves to Python."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    yield
    if counters["stats"]["unique_graphs"] == before:
        raise PeerError("Dynamo captured no graph of it: everything ran eagerly")


@contextlib.contextmanager
def inductor_code() -> Iterator[list[ModuleType]]:
    """Inductor made code, or found it in its cache; gives the modules with that code."""
    from torch._inductor.codecache import PyCodeCache

    load, loaded = PyCodeCache.load_by_key_path, []

    def recording(*args: Any, **kwargs: Any) -> ModuleType:
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    with dynamo_graphs(), mock.patch.object(PyCodeCache, "load_by_key_path", recording):
        yield loaded
    if not loaded:
        raise PeerError("Inductor generated no code for it: its graphs ran eagerly")


@contextlib.contextmanager
def weights_frozen(weights: int) -> Iterator[None]:
    """Inductor took at least one of so many weights into its code as a constant."""
    from torch._inductor import freezing

    freeze, frozen = freezing.freeze, 0

    def counting(dynamo_graph: Any, graph: Any, inputs: Any) -> tuple[Any, list[int]]:
        nonlocal frozen
        result, kept = freeze(dynamo_graph, graph, inputs)
        frozen += len(inputs) - len(kept)
        return result, kept

    with mock.patch.object(freezing, "freeze", counting):
        yield
    if weights and not frozen:
        raise PeerError(f"freezing was asked for, but none of its {weights} weights was frozen")


def left_to_eager(tool: str, operators: Iterable[str]) -> str:
    names = sorted(set(operators))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{tool} left these operators to eager: {', '.join(names[:4])}{more}"
