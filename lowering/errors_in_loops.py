"""What is wrong in a loop that threads share is an error, as in eager, and not the process's end.

Inductor (2.13) checks indices and assertions within its loops and throws from there. Out of a loop
that OpenMP divides no exception may leave: one token beyond the vocabulary ended the whole process.
In the generated source such a loop keeps its first error, which is thrown when the threads are
done. Where an index is used under a mask (of padding), Inductor checks nothing at all; here it is
checked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowering.replacing import replaced

_CHECKS = ("TORCH_CHECK(", "throw std::")  # of an index; of what `torch._assert_async` says
# As torch says it. Python's own "list index out of range" would be a fault of ours.
_WRONG_INDEX = (
    "index out of bounds: ",
    "is out of bounds",
    "index out of range in self",
    "out of range: tried to access",
    "is not in the valid range",
    "Class values must be",
)
_ALL = ".all_masked()"
_SHARED = re.compile(r"#pragma omp (?:for|single)\b")
_DEPTH = re.compile(r"collapse\((\d+)\)")
_DECLARED = "std::atomic_flag has_failed = ATOMIC_FLAG_INIT; std::exception_ptr failure;"
_KEPT = "catch (...) { if (!has_failed.test_and_set()) failure = std::current_exception(); }"
_THROWN = "if (failure) std::rethrow_exception(failure);"


@contextlib.contextmanager
def reach_the_caller() -> Iterator[None]:
    """For the time in which Inductor generates code."""
    from torch._inductor.codegen import cpp

    with (
        replaced(getattr(cpp, "KernelGroup", None), "codegen_group", _writing),
        replaced(getattr(cpp, "CppKernel", None), "indirect_assert", _checking),
    ):
        yield


def _writing(write: Callable[..., str]) -> Callable[..., str]:
    def written(self: Any, *args: Any, **kwargs: Any) -> str:
        return with_errors_kept(write(self, *args, **kwargs))

    return written


def _checking(check: Callable[..., str]) -> Callable[..., str]:
    """Of one index, where a mask says whether anything is read with it. Inductor's own `~mask` is
    true of both truth values in C++: it checks nothing, and memory of others is read."""

    def checked(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        line = check(self, var, lower, upper, None)
        if not mask:
            return line
        call = f"{self.assert_function}("
        whole = str(mask)
        if whole.endswith(_ALL):  # of a vector of them, any one reads
            whole = f"!{whole.removesuffix(_ALL)}.all_zero()"
        return line.replace(call, f"{call}!({whole}) || ", 1)

    return checked


def is_a_wrong_index(error: Exception) -> bool:
    """Did generated code, or a kernel of torch's in it, find an index out of range? Those are the
    user's."""
    kinds = (IndexError, RuntimeError)
    return isinstance(error, kinds) and any(text in str(error) for text in _WRONG_INDEX)


def with_errors_kept(source: str) -> str:
    """The source of one function in which shared loops that check something keep their error."""
    lines = source.split("\n")
    bodies = [
        body
        for number, line in enumerate(lines)
        if _SHARED.match(line.strip())
        for body in [_body_behind(lines, number)]
        if body is not None
        and any(check in inner for inner in lines[slice(*body)] for check in _CHECKS)
    ]
    whole = _block_behind(lines, 0)
    if not bodies or whole is None:
        return source
    before = {begin: "try {" for begin, _ in bodies} | {whole[0]: _DECLARED}
    behind = {end: f"}} {_KEPT}" for _, end in bodies} | {whole[1]: _THROWN}
    result = ["#include <exception>"]
    for number, line in enumerate(lines):
        result += [added[number] for added in (behind, before) if number in added]
        result.append(line)
    return "\n".join(result)


def _body_behind(lines: Sequence[str], pragma: int) -> tuple[int, int] | None:
    """What each step of a shared loop runs, or of the innermost one that is shared with it."""
    depth = _DEPTH.search(lines[pragma])
    body: tuple[int, int] | None = (pragma, len(lines))
    for _ in range(int(depth[1]) if depth else 1):
        body = body and _block_behind(lines, body[0])
    return body


def _block_behind(lines: Sequence[str], number: int) -> tuple[int, int] | None:
    """The lines within the next braces, of which each has a line of its own and closes as far in
    as it was opened."""
    for begin in range(number, len(lines)):
        if lines[begin].strip() == "{":
            closing = lines[begin].replace("{", "}")
            ends = (end for end in range(begin, len(lines)) if lines[end].rstrip() == closing)
            end = next(ends, None)
            return None if end is None else (begin + 1, end)
    return None
